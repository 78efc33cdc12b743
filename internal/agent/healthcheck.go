// SPDX-License-Identifier: Apache-2.0

package agent

// healthCheckNodePort: a load balancer asks a node, on a port that the Service
// names, whether it has endpoints of that Service (externalTrafficPolicy Local).

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/state"
)

// healthChecks are the servers of all Services that have such a port.
type healthChecks struct {
	log     *slog.Logger
	healthy func() bool // the agent itself

	mu      sync.Mutex
	servers map[k8s.Key]*healthCheck
}

// healthCheck is one Service's.
type healthCheck struct {
	port   uint16
	local  atomic.Int64 // endpoints of this node that are ready
	cancel context.CancelFunc
	done   chan struct{}
	err    error // why nobody listens
}

func newHealthChecks(log *slog.Logger, healthy func() bool) *healthChecks {
	return &healthChecks{log: log, healthy: healthy, servers: map[k8s.Key]*healthCheck{}}
}

// localReady counts the endpoints of this node that are ready, each address once.
func localReady(s state.Service) int64 {
	seen := map[string]bool{}
	for _, p := range s.Ports {
		for _, b := range p.Backends {
			if b.Local && b.Ready {
				seen[b.AddrPort.Addr().String()] = true
			}
		}
	}
	return int64(len(seen))
}

// set serves the check of a Service. An error names the port that is taken; it
// is tried again with the Service's next change.
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
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	l, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(int(c.port))))
	if err != nil {
		c.err = err
		close(c.done)
		return
	}
	go func() {
		defer close(c.done)
		if err := serveOn(ctx, l, h.handler(key, c)); err != nil && !errors.Is(err, http.ErrServerClosed) {
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

func (h *healthChecks) stop(key k8s.Key) {
	if c := h.servers[key]; c != nil {
		delete(h.servers, key)
		c.cancel()
		<-c.done
	}
}

// close ends all.
func (h *healthChecks) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key := range h.servers {
		h.stop(key)
	}
}
