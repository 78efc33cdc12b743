// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Pods reach the agent's health, and learn nothing of others' objects by it.
func TestOnlyTheNodeIsToldOfObjects(t *testing.T) {
	look := func() Health {
		return Health{Problems: map[string][]string{"NetworkPolicy bank/vault": {"a rule is left out"}}}
	}
	answer := answerHealth(look, prometheus.NewCounterVec(prometheus.CounterOpts{Name: "answers"}, []string{"code"}))
	for client, told := range map[string]bool{"127.0.0.1:9": true, "[::1]:9": true, "192.0.2.1:9": true, "192.0.2.2:9": false, "10.1.0.2:9": false, "[fd00::1]:9": false} {
		own := net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[::ffff:192.0.2.1]:10256")) // as a socket of both families has it
		r := httptest.NewRequest(http.MethodGet, "/healthz", nil)
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, own))
		r.RemoteAddr = client
		w := httptest.NewRecorder()
		answer(w, r)
		if got := strings.Contains(w.Body.String(), "bank/vault"); got != told || w.Code != http.StatusOK {
			t.Errorf("%s: %d %s", client, w.Code, w.Body)
		}
	}
}

// Whoever asks an agent that stands still how it is has an end; and the way there is no proxy's.
func TestAskingForHealth(t *testing.T) {
	defer func(before time.Duration) { healthPatience = before }(healthPatience)
	healthPatience = 500 * time.Millisecond
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { t.Errorf("the proxy is asked for %s", r.URL) }))
	defer proxy.Close()
	t.Setenv("HTTP_PROXY", proxy.URL)
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	still := make(chan struct{})
	hangs := false
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if hangs {
			<-still
		}
		w.Write([]byte(`{"nodeMode": "direct"}`))
	}))
	s.Listener.Close()
	s.Listener = l
	s.Start()
	defer s.Close()
	defer close(still)
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddr("127.0.0.1") // to which no proxy leads, whatever is said
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			at = p.Addr()
		}
	}
	config := Config{HealthAddress: netip.AddrPortFrom(at, port).String()}
	if h, err := AskHealth(t.Context(), config); err != nil || h.NodeMode != "direct" {
		t.Errorf("at %s: %+v, %v", at, h, err)
	}
	if h, err := AskHealth(t.Context(), Config{HealthAddress: None, NodeMode: "vxlan"}); err != nil || !h.Unserved || h.NodeMode != "vxlan" {
		t.Errorf("one that tells nobody: %+v, %v", h, err)
	}
	hangs = true
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := AskHealth(ctx, config); err == nil || ctx.Err() != nil {
		t.Errorf("one that stands still: %v, %v", err, ctx.Err())
	}
}
