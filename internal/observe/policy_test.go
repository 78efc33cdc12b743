// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/dptest"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/policy/manifest"
	"github.com/mustang-net/mustang/internal/state"
)

// apply applies NetworkPolicies of the namespace shop, each by its name and spec.
func (w *world) apply(specs map[string]string) {
	w.t.Helper()
	for name, spec := range specs {
		text := fmt.Sprintf("{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: %s, namespace: shop}, spec: %s}", name, spec)
		f, err := manifest.Read(strings.NewReader(text))
		if err != nil {
			w.t.Fatalf("%s: %v", text, err)
		}
		w.do(func(e *engine.Engine) error { return e.ApplyPolicyFile(f.Policies, nil) })
	}
}

const (
	denyIn  = "{podSelector: {matchLabels: {app: app-2}}, policyTypes: [Ingress]}"
	denyOut = "{podSelector: {matchLabels: {app: app-1}}, policyTypes: [Egress]}"
)

// What policy drops is told with the policies that select the pod, and the mend
// that `why` writes is applied as it stands: then it passes.
func TestTheMendOfAPolicyDropMendsIt(t *testing.T) {
	for _, path := range []state.ServicePath{state.PathBoth, state.PathTC} {
		for _, x := range []struct{ name, deny, direction, reason string }{
			{"deny-in", denyIn, "ingress", "policy_ingress"},
			{"deny-out", denyOut, "egress", "policy_egress"},
		} {
			t.Run(string(path)+"/"+x.direction, func(t *testing.T) {
				w := newWorld(t)
				client, server := w.veth(1, path), w.veth(2, path)
				w.services(server)
				w.serve(server)
				w.apply(map[string]string{x.name: x.deny})
				w.open()
				c := w.watch(WatchOptions{Filter: Filter{Reasons: []string{x.reason}}})
				w.sendFrames(client, false, dptest.Eth([6]byte(client.MAC), [6]byte(client.NodeMAC)).IP(client.IP4, server.IP4).TCP(1000, serverPort, oracle.SYN).Frame())
				f := c.expect(x.reason, func(f Flow) bool { return f.Reason == x.reason && f.Verdict == Dropped })
				if len(f.Policy) == 0 {
					t.Fatalf("told as %+v", f)
				}
				last := f.Policy[len(f.Policy)-1]
				if !last.Denied() || last.Direction != x.direction || !slices.Equal(last.SelectedBy, []string{"shop/" + x.name}) ||
					f.Destination.Name() != "shop/pod-2" || f.Destination.Port != serverPort {
					t.Errorf("told as %+v", f)
				}
				for i, to := range []string{netip.AddrPortFrom(server.IP6, serverPort).String(), shop4.String(), shop4.String() + "/udp", server.IP4.String()} {
					a := w.why("shop/pod-1", to)
					if a.Verdict != Dropped || a.Ways[0].Reason != x.reason || !strings.Contains(a.Sentence, "shop/"+x.name) {
						t.Fatalf("%s: %+v", to, a)
					}
					_, rule, _ := strings.Cut(a.Mend, "`")
					rule, _, _ = strings.Cut(rule, "`")
					selector := strings.TrimSuffix(x.deny, "}")
					w.apply(map[string]string{"mend": fmt.Sprintf("%s, %s: [{%s}]}", selector, x.direction, rule)})
					if b := w.why("shop/pod-1", to); b.Verdict != Forwarded || !strings.Contains(b.Text(), "allowed by rule 1 of shop/mend") {
						t.Errorf("%s is not mended by %s: %s", to, rule, b.Text())
					}
					if network := map[int]string{0: "tcp", 1: "tcp", 2: "udp"}[i]; network != "" {
						at := netip.MustParseAddrPort(strings.TrimSuffix(to, "/udp"))
						if err := talk(client, network, at); err != nil {
							t.Errorf("%s by %s: %v", to, network, err)
						}
					}
					// The next one is not allowed by this mend.
					w.apply(map[string]string{"mend": x.deny})
				}
			})
		}
	}
}
