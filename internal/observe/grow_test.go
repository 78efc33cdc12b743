// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/state"
)

// More Services than the tables have room for at first: connections by the first
// and the last of them, by both ways, and what a node says that was opened before.
func TestServicesBeyondTheFirstTables(t *testing.T) {
	for _, path := range []state.ServicePath{state.PathSocket, state.PathTC} {
		w := newWorld(t)
		client, server := w.veth(1, path), w.veth(2, path)
		w.services(server)
		w.serve(server)
		w.open()
		var many []state.Service
		last := netip.MustParseAddrPort("10.97.0.1:80")
		for range 5000 { // 4096 fit
			last = netip.AddrPortFrom(last.Addr().Next(), 80)
			many = append(many, plain(state.TCP, last, netip.AddrPortFrom(server.IP4, serverPort)))
		}
		e, err := engine.Open(context.Background(), w.scope, engine.Options{Sizes: datapath.Sizes{Services: 1 << 18, Slots: 1 << 19, Backends: 1 << 18}, Notify: func(s string) { t.Log(s) }})
		w.check(err)
		w.check(e.AddServices(many...))
		w.check(e.Close())
		for _, to := range []netip.AddrPort{shop4, shop6, last} {
			if err := talk(client, "tcp", to); err != nil {
				t.Errorf("%s: %s: %v", path, to, err)
			}
			if a := w.why("shop/pod-1", to.String()); a.Verdict != Forwarded {
				t.Errorf("%s: %s: %s, %s", path, to, a.Verdict, a.Sentence)
			}
		}
	}
}
