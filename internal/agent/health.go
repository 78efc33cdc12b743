// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/mustang-net/mustang/internal/node"
)

// stuck is how long the loop may be silent, or something may fail to be
// applied, before the agent calls itself unhealthy.
const stuck = 60 * time.Second

// Health is what /healthz, /readyz and /livez answer.
type Health struct {
	// The first two are kube-proxy's, whose readers expect them.
	LastUpdated  time.Time `json:"lastUpdated"`
	CurrentTime  time.Time `json:"currentTime"`
	NodeEligible *bool     `json:"nodeEligible,omitempty"`
	Because      []string  `json:"because,omitempty"` // why it is not well
	// Problems are objects that are not in force in whole, and a configuration that is
	// not. They are no reason to call the agent ill.
	Problems map[string][]string `json:"problems,omitempty"`
	// SyncAge is for how many seconds the API server has not been followed.
	SyncAge  float64 `json:"syncAge"`
	NodeMode string  `json:"nodeMode"`
	// Unserved: with health-address none the agent tells nobody, and nothing else of this is known.
	Unserved bool `json:"unserved,omitempty"`
}

// live says whether the agent does its work. An API server that is away is no
// reason to restart an agent: that would not bring it back.
func (a *Agent) live() (h Health) {
	now := time.Now()
	h.CurrentTime, h.LastUpdated = now, now
	h.SyncAge, h.NodeMode = a.outage().Seconds(), a.config.NodeMode
	if alive := a.sync.alive.Load(); now.Sub(*alive) > stuck {
		h.Because = append(h.Because, fmt.Sprintf("nothing has been applied for %v", now.Sub(*alive).Round(time.Second)))
		h.LastUpdated = *alive
	}
	return h
}

// works says whether Services are served here: the agent lives, knows what there
// is, and can apply it.
func (a *Agent) works() Health {
	h := a.live()
	if !a.sync.synced.Load() {
		because := "not everything that there is has been applied yet"
		if _, err := a.watch.Outage(); err != nil {
			because += ": " + err.Error()
		}
		h.Because = append(h.Because, because)
	}
	for _, r := range []struct {
		what string
		*retrying
	}{{"a Service", &a.sync.retrying}, {"policy", &a.policies.retrying}, {"the list of nodes", &a.sync.membersRetry}, {"the edge", &a.sync.edgeRetry},
		{"the edge, where the devices are now,", &a.sync.followRetry}, {"this build's programs", &a.kept.upgrade}, {"programs that somebody has taken off pods", &a.kept.reattach},
		{"the rules for masqueraded pods", &a.kept.masquerade}, {"the ways to other nodes, as the devices are now,", &a.kept.devices}} {
		if since := r.failed.Load(); since != nil && time.Since(*since) > stuck {
			h.Because = append(h.Because, r.what+" could not be applied since "+since.Format(time.RFC3339))
		}
	}
	if a.engine != nil {
		if err := a.engine.Displaced(); err != nil {
			h.Because = append(h.Because, err.Error())
		}
	}
	if why := a.sync.unready.Load(); why != nil && *why != "" {
		h.Because = append(h.Because, *why)
	}
	return h
}

// healthy says whether load balancers should send here (KEP-3836): Services are
// served, and the node is to stay.
func (a *Agent) healthy() Health {
	h := a.works()
	eligible := true
	if n := a.watch.Nodes.Get(a.nodeKey()); n != nil && n.Leaving {
		eligible = false
		h.Because = append(h.Because, "the node is being deleted")
	}
	h.NodeEligible = &eligible
	h.Problems = map[string][]string{}
	for o, list := range a.problems.list() {
		h.Problems[o.String()] = list
	}
	if a.configChanged.Load() {
		h.Problems["configuration "+a.config.file] = []string{anotherConfig}
	}
	for setting, names := range a.config.named() {
		if away := node.CheckDevices(names); away != nil {
			h.Problems["configuration "+setting] = strings.Split(away.Error(), "\n")
		}
	}
	return h
}

func answerHealth(look func() Health, count *prometheus.CounterVec) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		h, code := look(), http.StatusOK
		if !fromHere(r) { // pods reach it, too, and have no business with others' objects
			h.Problems = nil
		}
		if len(h.Because) > 0 {
			code = http.StatusServiceUnavailable
		}
		count.WithLabelValues(strconv.Itoa(code)).Inc()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(h) // a reader that has gone
	}
}

// fromHere says that this node asks.
func fromHere(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	own, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return err == nil && (peer.Addr().Unmap().IsLoopback() || ok && own.AddrPort().Addr().Unmap() == peer.Addr().Unmap())
}

func (a *Agent) serveHealth(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("GET /healthz", answerHealth(a.healthy, a.metrics.healthz))
	mux.Handle("GET /readyz", answerHealth(a.works, a.metrics.readyz))
	mux.Handle("GET /livez", answerHealth(a.live, a.metrics.livez))
	return serveHTTP(ctx, "health-address", a.config.HealthAddress, mux)
}

// healthPatience is how long an agent may take to say how it is.
var healthPatience = 10 * time.Second

// AskHealth asks the agent with this configuration, on this node: no proxy has the way there.
// One that is not well answers, too.
func AskHealth(ctx context.Context, c Config) (h Health, err error) {
	if c.HealthAddress == None {
		return Health{NodeMode: c.NodeMode, Unserved: true}, nil
	}
	at, err := netip.ParseAddrPort(c.HealthAddress)
	if err != nil {
		return h, err
	}
	if at.Addr().IsUnspecified() {
		at = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+"/healthz", nil)
	if err != nil {
		return h, err
	}
	client := http.Client{Timeout: healthPatience, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(r)
	if err != nil {
		return h, fmt.Errorf("ask the agent how it is: %w", err)
	}
	defer answer.Body.Close()
	return h, json.NewDecoder(answer.Body).Decode(&h)
}

func (a *Agent) serveMetrics(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.metrics.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 2}))
	return serveHTTP(ctx, "metrics-address", a.config.MetricsAddress, mux)
}

// serveHTTP serves until ctx ends, and returns when nothing of it runs any more.
func serveHTTP(ctx context.Context, what, address string, handler http.Handler) error {
	if address == None {
		return nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("%s %s: %w; give another, or none", what, address, err)
	}
	return serveOn(ctx, l, handler)
}

// stopPatience is how long a server may finish what it is answering.
const stopPatience = 2 * time.Second

// newServer is one that waits for nobody who asks, or reads the answer, slowly, and
// keeps little of what is asked.
func newServer(handler http.Handler) *http.Server {
	return &http.Server{Handler: handler, ReadTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 8 << 10}
}

func serveOn(ctx context.Context, l net.Listener, handler http.Handler) error {
	s := newServer(handler)
	done := make(chan error, 1)
	go func() { done <- s.Serve(newClients(l)) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	patience, cancel := context.WithTimeout(context.Background(), stopPatience)
	defer cancel()
	err := s.Shutdown(patience)
	if errors.Is(err, context.DeadlineExceeded) {
		err = s.Close()
	}
	<-done
	return err
}
