// SPDX-License-Identifier: Apache-2.0

package agent

// healthCheckNodePort: a load balancer asks a node, on a port that the Service
// names, whether it has endpoints of that Service (externalTrafficPolicy Local).

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/state"
)

// healthChecks are the servers of all Services that have such a port.
type healthChecks struct {
	log     *slog.Logger
	healthy func() bool    // the agent itself
	at      []netip.Prefix // node ports are at these addresses; none: at all

	mu      sync.Mutex
	servers map[k8s.Key]*healthCheck
}

// healthCheck is one Service's.
type healthCheck struct {
	port   uint16
	local  atomic.Int64 // endpoints of this node that are ready
	server *http.Server
	done   chan struct{}
	err    error // why nobody listens
}

func newHealthChecks(log *slog.Logger, at []netip.Prefix, healthy func() bool) *healthChecks {
	return &healthChecks{log: log, at: at, healthy: healthy, servers: map[k8s.Key]*healthCheck{}}
}

// localReady counts the endpoints of this node that are ready, each once: with
// two families, those of the one that has more.
func localReady(s state.Service) int64 {
	v4, v6 := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, p := range s.Ports {
		for _, b := range p.Backends {
			switch a := b.AddrPort.Addr(); {
			case !b.Local || !b.Ready:
			case a.Is4():
				v4[a] = true
			default:
				v6[a] = true
			}
		}
	}
	return int64(max(len(v4), len(v6)))
}

// set serves the check of a Service. An error names the port that is taken;
// unserved has it until it is tried again.
func (h *healthChecks) set(key k8s.Key, s state.Service) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.servers[key]
	if c != nil && (c.port != s.HealthCheckNodePort || c.err != nil) {
		h.stop(key)
		c = nil
	}
	if c == nil {
		c = &healthCheck{port: s.HealthCheckNodePort, done: make(chan struct{})}
		h.servers[key] = c
		h.start(key, c)
	}
	c.local.Store(localReady(s))
	return c.err
}

func (h *healthChecks) start(key k8s.Key, c *healthCheck) {
	c.server = newServer(h.handler(key, c))
	l, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(int(c.port))))
	if err != nil {
		c.err = err
		close(c.done)
		return
	}
	go func() {
		defer close(c.done)
		clients := newClients(l)
		clients.at = h.at
		if err := c.server.Serve(clients); !errors.Is(err, http.ErrServerClosed) {
			h.log.Error("a health check ended", "service", key, "port", c.port, "error", err)
		}
	}()
}

// handler answers in kube-proxy's form, which load balancers' checks were
// written for.
func (h *healthChecks) handler(key k8s.Key, c *healthCheck) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n, well := c.local.Load(), h.healthy()
		code := http.StatusOK
		if n == 0 || !well {
			code = http.StatusServiceUnavailable
		}
		type name struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.FormatInt(n, 10))
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(struct { // a reader that has gone
			Service             name  `json:"service"`
			LocalEndpoints      int64 `json:"localEndpoints"`
			ServiceProxyHealthy bool  `json:"serviceProxyHealthy"`
		}{name{key.Namespace, key.Name}, n, well})
	})
}

// remove ends the check of a Service that has none.
func (h *healthChecks) remove(key k8s.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stop(key)
}

// retain ends the checks of all Services but those that have this port still.
func (h *healthChecks) retain(has func(k8s.Key, uint16) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key, c := range h.servers {
		if !has(key, c.port) {
			h.stop(key)
		}
	}
}

// unserved are the Services whose port was taken.
func (h *healthChecks) unserved() (list []k8s.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key, c := range h.servers {
		if c.err != nil {
			list = append(list, key)
		}
	}
	return list
}

func (h *healthChecks) stop(key k8s.Key) {
	if c := h.servers[key]; c != nil {
		delete(h.servers, key)
		_ = c.server.Close() // a client that says nothing holds nobody up
		<-c.done
	}
}

// close ends all.
func (h *healthChecks) close() { h.retain(func(k8s.Key, uint16) bool { return false }) }
