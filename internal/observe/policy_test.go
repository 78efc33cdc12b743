// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

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

// A rule may go by the name of a port: then what it comes to, and the number of that, is the pod's own.
func TestAPolicyByTheNameOfAPortIsNamed(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathBoth), w.veth(2, state.PathBoth)
	w.do(func(e *engine.Engine) error { return e.RemoveEndpoint(server.ID) })
	w.do(func(e *engine.Engine) error {
		_, err := e.AddEndpoint(context.Background(), engine.EndpointSpec{
			Netns: server.Netns, IfName: "eth0", Owner: state.OwnerCLI, ServicePath: state.PathBoth, Pod: server.Pod,
			Labels: server.Labels, Ports: []state.NamedPort{{Name: "sql", Protocol: state.TCP, Number: 5432}},
		})
		return err
	})
	w.apply(map[string]string{"by-name": "{podSelector: {matchLabels: {app: app-2}}, ingress: [{ports: [{port: sql}]}]}"})
	w.open()
	for port, want := range map[uint16]string{5432: Forwarded, 5433: Dropped} {
		a := w.why("shop/pod-1", netip.AddrPortFrom(server.IP4, port).String())
		if a.Verdict != want || !strings.Contains(a.Text(), "shop/by-name") {
			t.Errorf("%s to port %d: %+v", client.Pod.Name, port, a)
		}
	}
}

// `ep add` tells a pod's namespace, and not its name: its namespace counts all the same.
func TestTheMendNamesTheNamespaceOfAPodWithoutAName(t *testing.T) {
	for _, ns := range []string{"elsewhere", "", "shop"} {
		t.Run("namespace "+ns, func(t *testing.T) {
			w := newWorld(t)
			client := w.veth(1, state.PathBoth)
			w.do(func(e *engine.Engine) error { return e.RemoveEndpoint(client.ID) })
			w.endpointOf(1, w.name+"-p1", state.PathBoth, state.PodRef{Namespace: ns})
			server := w.veth(2, state.PathBoth)
			w.apply(map[string]string{"deny-in": denyIn})
			w.open()
			to := netip.AddrPortFrom(server.IP4, serverPort).String()
			a := w.why(w.name+"-p1", to)
			_, rule, _ := strings.Cut(a.Mend, "`")
			rule, _, _ = strings.Cut(rule, "`")
			w.apply(map[string]string{"mend": fmt.Sprintf("%s, ingress: [{%s}]}", strings.TrimSuffix(denyIn, "}"), rule)})
			if b := w.why(w.name+"-p1", to); a.Verdict != Dropped || b.Verdict != Forwarded {
				t.Errorf("%s, and with %s: %s", a.Sentence, rule, b.Text())
			}
		})
	}
}

// A rule that `why` prints is read by kubectl, which turns it to JSON before it
// knows that labels are strings.
func TestARuleKeepsLabelsStrings(t *testing.T) {
	address := netip.MustParseAddr("fd00::1")
	isolated := End{Endpoint: 1, Namespace: "shop"}
	for _, x := range []struct {
		peer End
		want map[string]any
	}{
		{End{Endpoint: 2, Namespace: "shop", Labels: map[string]string{"app": "web"}}, matching("app", "web")},
		{End{Endpoint: 2, Namespace: "shop", Labels: map[string]string{"index": "0", "on": "true", "none": "", "1": "1e3"}},
			matching("index", "0", "on", "true", "none", "", "1", "1e3")},
		{End{Endpoint: 2, Namespace: "0", Labels: map[string]string{"app": "~"}},
			map[string]any{"podSelector": labels("app", "~"), "namespaceSelector": labels("kubernetes.io/metadata.name", "0")}},
		{End{Endpoint: 2, Namespace: "shop", Labels: map[string]string{
			"app": "db", "controller-revision-hash": "db-5d4", "apps.kubernetes.io/pod-index": "0", "statefulset.kubernetes.io/pod-name": "db-0"}},
			matching("app", "db")},
		{End{Endpoint: 2, Namespace: "shop", Labels: map[string]string{"pod-template-hash": "12345"}}, matching("pod-template-hash", "12345")},
		{End{Endpoint: 2, Namespace: "shop"}, map[string]any{"podSelector": map[string]any{}}},
		{End{Address: address}, map[string]any{"ipBlock": map[string]any{"cidr": "fd00::1/128"}}},
	} {
		rule := (&question{proto: protoTCP}).rule("from", isolated, x.peer, 80)
		var got map[string]any
		if err := yaml.Unmarshal([]byte("{"+rule+"}"), &got); err != nil {
			t.Errorf("%s: %v", rule, err)
			continue
		}
		want := map[string]any{"from": []any{x.want}, "ports": []any{map[string]any{"protocol": "TCP", "port": 80.0}}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", rule, diff)
		}
	}
}

// matching is a peer by its pod's labels, given as name, value, name, value, …
func matching(pairs ...string) map[string]any { return map[string]any{"podSelector": labels(pairs...)} }

func labels(pairs ...string) map[string]any {
	out := map[string]any{}
	for pair := range slices.Chunk(pairs, 2) {
		out[pair[0]] = pair[1]
	}
	return map[string]any{"matchLabels": out}
}

// An answer on a connection that policy has cut since is told as what it is: from the server, to the client.
func TestAnAnswerThatPolicyCutsIsToldFromItsSender(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathTC), w.veth(2, state.PathTC)
	question := dptest.Eth([6]byte(client.MAC), [6]byte(client.NodeMAC)).IP(client.IP4, server.IP4).UDP(1000, 2000).Frame()
	answer := dptest.Eth([6]byte(server.MAC), [6]byte(server.NodeMAC)).IP(server.IP4, client.IP4).UDP(2000, 1000).Frame()
	w.sendFrames(client, false, question)
	w.sendFrames(server, false, answer)
	w.open()
	c := w.watch(WatchOptions{Filter: Filter{Reasons: []string{"policy_ingress"}}})
	w.apply(map[string]string{"deny-in": denyIn})
	w.sendFrames(server, false, answer)
	f := c.expect("the answer", func(f Flow) bool { return f.Source.Port == 2000 || f.Destination.Port == 2000 })
	if f.Source.Name() != "shop/pod-2" || f.Source.Address != server.IP4 || f.Destination.Name() != "shop/pod-1" || f.Destination.Address != client.IP4 {
		t.Errorf("told as %+v", f)
	}
}
