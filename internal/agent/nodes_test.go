// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// onNIC gives this namespace a link with an address.
func onNIC(t *testing.T, address string) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "nic0"
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "wire0"}))
	for _, name := range []string{"wire0", "nic0"} {
		l, err := netlink.LinkByName(name)
		must(t, err)
		must(t, netlink.LinkSetUp(l))
		if name == "nic0" {
			a, err := netlink.ParseAddr(address)
			must(t, err)
			must(t, netlink.AddrAdd(l, a))
		}
	}
}

func clusterNode(name, address, pods string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: []string{pods}}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}
	return n
}

// At its start an agent says what holds between nodes; who tries something else beside it has that until the next.
func TestSettingsBetweenNodesAreTheAgents(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		onNIC(t, "192.0.2.1/24")
		w := newScripted(t)
		defer func() { w.close() }()
		is := func(when string, want state.NodeSettings) {
			t.Helper()
			must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
				_, set, err := e.Nodes()
				if !reflect.DeepEqual(set, want) {
					t.Errorf("%s: %+v, want %+v", when, set, want)
				}
				return err
			}))
		}
		turn := func(config Config, nodes ...any) {
			w.agent.config.NodeMode = "vxlan"
			w.agent.config.HostRouting, w.agent.config.NodeDevices = config.HostRouting, config.NodeDevices
			w.agent.config.VXLANVNI, w.agent.config.VXLANPort = config.VXLANVNI, config.VXLANPort
			w.tellObjects(nil, nil)
			check(t, w.agent.watch.Nodes.Replace(nodes, ""))
			w.turn()
		}
		ours := Config{HostRouting: "legacy", VXLANVNI: 7, VXLANPort: 8472, NodeDevices: []string{"nic0"}}
		self, other := clusterNode("n1", "192.0.2.1", "10.1.1.0/24"), clusterNode("n2", "192.0.2.2", "10.1.2.0/24")
		turn(ours, self)
		want := state.NodeSettings{HostRouting: state.RoutingLegacy, Devices: []string{"nic0"}, VNI: 7, Port: 8472}
		is("at the start", want)
		must(t, w.agent.with(t.Context(), func(e *engine.Engine) error { return e.SetNode(node.SettingsSpec{VNI: 9}) }))
		turn(ours, self, other)
		want.VNI = 9
		is("with another node, after somebody tried another number", want)
		w.close()
		w.open()
		turn(Defaults(), self, other)
		is("another agent, of the defaults", node.DefaultSettings())
	})
}

// What another node-mode has put into force would be nobody's: only Kubernetes may remove it.
func TestNodesGoWithTheirMode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		onNIC(t, "192.0.2.1/24")
		w := newScripted(t)
		defer func() { w.close() }()
		// is wants these nodes known, and each but this one to have its route.
		is := func(when string, names ...string) {
			t.Helper()
			var known []string
			must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
				list, _, err := e.Nodes()
				for _, n := range list {
					known = append(known, n.Name)
				}
				return err
			}))
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Protocol: 'm'}, netlink.RT_FILTER_PROTOCOL)
			must(t, err)
			if !slices.Equal(known, names) || len(routes) != max(len(names)-1, 0) {
				t.Errorf("%s: nodes %v, routes %v; want %v", when, known, routes, names)
			}
		}
		turn := func() {
			w.tellObjects(nil, nil)
			check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", "10.1.1.0/24"), clusterNode("n2", "192.0.2.2", "10.1.2.0/24")}, ""))
			w.turn()
		}
		w.agent.config.NodeMode = "direct"
		turn()
		is("direct", "n1", "n2")
		w.close()
		w.open() // node-mode none
		turn()
		is("none")
		// The command line's are its own.
		must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
			for _, spec := range []node.Spec{{Name: "n1", Address: []string{"192.0.2.1"}, PodCIDRs: []string{"10.1.1.0/24"}, Mode: "direct"},
				{Name: "n3", Address: []string{"192.0.2.3"}, PodCIDRs: []string{"10.1.3.0/24"}, Mode: "direct"}} {
				n, err := node.Parse(spec)
				if err != nil {
					return err
				}
				n.Owner = state.OwnerCLI
				if err := e.AddNode(n); err != nil {
					return err
				}
			}
			return nil
		}))
		w.close()
		w.open()
		turn()
		is("none, with the command line's", "n1", "n3")
	})
}

// A machine is made anew under another name, and its Node from before is there still.
func TestThisNodeIsWhatItSays(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	w := newScripted(t)
	defer w.close()
	w.agent.config.NodeMode = "direct"
	born := func(n *corev1.Node, when int64) *corev1.Node {
		n.CreationTimestamp = metav1.Unix(when, 0)
		return n
	}
	check(t, w.agent.watch.Nodes.Replace([]any{born(clusterNode("a", "192.0.2.1", "10.1.9.0/24"), 9), born(clusterNode("n1", "192.0.2.1", "10.1.1.0/24"), 1),
		born(clusterNode("b", "192.0.2.2", "10.1.2.0/24"), 2), born(clusterNode("c", "192.0.2.2", "10.1.8.0/24"), 3),
		clusterNode("d", "192.0.2.3", "10.1.3.0/24"), clusterNode("e", "192.0.2.3", "10.1.4.0/24")}, ""))
	list, wrong := w.agent.nodes(nil)
	var names []string
	for _, n := range list {
		names = append(names, n.Name)
	}
	if want := []string{"c", "d", "n1"}; !slices.Equal(names, want) || len(wrong) != 3 {
		t.Errorf("nodes %v, want %v: this one, the youngest, the first by name; wrong: %q", names, want, wrong)
	}
}

// A node that no tunnel can lead to is named, and the others are in force without it.
func TestANodeOfAnotherFamilyIsLeftOut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		onNIC(t, "192.0.2.1/24")
		w := newScripted(t)
		defer w.close()
		w.agent.config.NodeMode = "vxlan"
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", "10.1.1.0/24"), clusterNode("n2", "192.0.2.2", "10.1.2.0/24"),
			clusterNode("n3", "2001:db8::3", "10.1.3.0/24")}, ""))
		w.turn()
		var known []string
		must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
			list, _, err := e.Nodes()
			for _, n := range list {
				known = append(known, n.Name)
			}
			return err
		}))
		if !slices.Equal(known, []string{"n1", "n2"}) {
			t.Errorf("nodes %v, want n1 and n2", known)
		}
		if _, wrong := w.agent.nodes(nil); len(wrong) != 1 || !strings.HasPrefix(wrong[0], "node n3: ") {
			t.Errorf("wrong is %q", wrong)
		}
	})
}

// Kubelets tell of one family unless they are told to tell of both, whatever CIDRs the controller
// manager gives. What has no way in one family has its way in the other.
func TestPodsOfTwoFamiliesOnANodeOfOne(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	w := newScripted(t)
	defer w.close()
	var nodes []any
	for i, name := range []string{"n1", "n2"} {
		n := clusterNode(name, fmt.Sprintf("192.0.2.%d", i+1), fmt.Sprintf("10.1.%d.0/24", i+1))
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, fmt.Sprintf("fd00:1:%d::/64", i+1))
		nodes = append(nodes, n)
	}
	check(t, w.agent.watch.Nodes.Replace(nodes, ""))
	for mode, cidrs := range map[string]int{"direct": 1, "vxlan": 2} {
		w.agent.config.NodeMode = mode
		list, wrong := w.agent.nodes(nil)
		if len(list) != 2 || len(wrong) != 2*(2-cidrs) {
			t.Errorf("%s: nodes %v, want both; wrong: %q", mode, list, wrong)
		}
		for _, n := range list {
			if len(n.PodCIDRs) != cidrs {
				t.Errorf("%s: pods of %s are in %v, want %d networks", mode, n.Name, n.PodCIDRs, cidrs)
			}
		}
	}
}

// A node of the command line's stays, and holds up no other. When it goes, Kubernetes's of that
// name takes its place.
func TestNodesBesideTheCommandLines(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	for _, mode := range []string{"direct", "vxlan"} {
		inNamespace(func() {
			onNIC(t, "192.0.2.1/24")
			w := newScripted(t)
			defer w.close()
			w.agent.config.NodeMode = mode
			is := func(when string, want ...string) {
				t.Helper()
				w.turn()
				var known []string
				must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
					list, _, err := e.Nodes()
					for _, n := range list {
						known = append(known, n.Name+" "+n.Owner.String()+" "+n.PodCIDRs[0].String())
					}
					return err
				}))
				if !slices.Equal(known, want) || w.agent.sync.membersRetry.fails() {
					t.Errorf("%s, %s: nodes %q, want %q", mode, when, known, want)
				}
			}
			for _, spec := range []node.Spec{{Name: "n1", Address: []string{"192.0.2.1"}, PodCIDRs: []string{"10.1.1.0/24"}, Mode: mode},
				{Name: "n2", Address: []string{"192.0.2.2"}, PodCIDRs: []string{"10.1.2.0/24"}, Mode: mode}} {
				n, err := node.Parse(spec)
				must(t, err)
				n.Owner = state.OwnerCLI
				must(t, w.agent.with(t.Context(), func(e *engine.Engine) error { return e.AddNode(n) }))
			}
			w.tellObjects(nil, nil)
			check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", "10.1.1.0/24"), clusterNode("n2", "192.0.2.2", "10.1.9.0/24"),
				clusterNode("n3", "192.0.2.3", "10.1.3.0/24")}, ""))
			is("at first", "n1 cli 10.1.1.0/24", "n2 cli 10.1.2.0/24", "n3 kubernetes 10.1.3.0/24")
			must(t, w.agent.with(t.Context(), func(e *engine.Engine) error { return e.RemoveNode("n2", state.OwnerCLI) }))
			is("n2 goes", "n1 cli 10.1.1.0/24", "n2 kubernetes 10.1.9.0/24", "n3 kubernetes 10.1.3.0/24")
			if mode == "vxlan" {
				return // tunnels begin at n1
			}
			must(t, w.agent.with(t.Context(), func(e *engine.Engine) error { return e.RemoveNode("n1", state.OwnerCLI) }))
			is("n1 goes", "n1 kubernetes 10.1.1.0/24", "n2 kubernetes 10.1.9.0/24", "n3 kubernetes 10.1.3.0/24")
		})
	}
}
