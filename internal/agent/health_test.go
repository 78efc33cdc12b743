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
