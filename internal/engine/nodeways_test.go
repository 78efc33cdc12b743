// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// far is another node, by its address and its pods' network.
func far(name, address, pods string, mode state.NodeMode) state.Node {
	return state.Node{Name: name, Addrs: []netip.Addr{netip.MustParseAddr(address)}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix(pods)}, Mode: mode}
}

func (w *edgeWorld) apply(owner state.Owner, list []state.Node) {
	w.t.Helper()
	w.must(func(e *Engine) error { return e.ApplyNodes(owner, list, peers.SettingsSpec{}) })
}

// An address that another node is known by has moved here: this is the node that the agent said, also for who is told no name.
func TestThisNodeIsTheOneThatItsAgentNamed(t *testing.T) {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	w.run("ip addr add 198.51.100.100/24 dev w0")
	list := []state.Node{far("a", "198.51.100.100", "10.8.0.0/24", state.NodeVXLAN), far("b", "198.51.100.1", "10.9.0.0/24", state.NodeVXLAN)}
	is := func(when, want, address string) {
		t.Helper()
		w.must(func(e *Engine) error {
			self, err := e.Self()
			config, _, unread := e.dp.Node.Get(0)
			if self.Name != want || config.Ip4 != datapath.FromAddr(netip.MustParseAddr(address)) {
				t.Errorf("%s: this is %q, programs know %v; want %s, %s", when, self.Name, config.Ip4, want, address)
			}
			return errors.Join(err, unread)
		})
	}
	w.apply(state.OwnerKubernetes, list)
	is("nobody says who it is", "a", "198.51.100.100")
	n.opts.Node.Name = "b"
	w.apply(state.OwnerKubernetes, list)
	is("its agent does", "b", "198.51.100.1")
	n.opts.Node.Name = ""
	w.must(func(e *Engine) error { _, err := e.FollowDevices(); return err })
	is("the devices are followed", "b", "198.51.100.1")
}

// By a device without a link header the NIC's program would read what it is not: it is not there, and nothing
// leaves past the stack whose answers come to that.
func TestNodesBehindADeviceWithoutALinkHeader(t *testing.T) {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	w.run("ip tuntap add dev bare mode tun && ip addr add 10.77.0.1/24 dev bare && ip link set bare up && ip route add 192.0.2.1 dev bare")
	list := []state.Node{far("a", "198.51.100.1", "10.9.0.0/24", state.NodeDirect), far("b", "192.0.2.1", "10.8.0.0/24", state.NodeDirect)}
	w.apply(state.OwnerKubernetes, list)
	forwards := func(when string, ebpf bool) {
		t.Helper()
		w.must(func(e *Engine) error {
			config, _, err := e.dp.Node.Get(0)
			s, unknown := e.Status()
			warned := strings.Contains(strings.Join(s.Warnings, "\n"), "reached by bare")
			if (config.Flags&bpfgen.NodeEbpf != 0) != ebpf || warned == ebpf || (s.Nodes.HostRouting == state.RoutingEBPF) != ebpf {
				t.Errorf("%s: flags %b, host routing %s, warnings %q", when, config.Flags, s.Nodes.HostRouting, s.Warnings)
			}
			bare, err2 := netlink.LinkByName("bare")
			for _, i := range e.dp.WireDevices() {
				if err2 == nil && i == bare.Attrs().Index {
					t.Errorf("%s: the NIC's program is at bare", when)
				}
			}
			return errors.Join(err, unknown, err2)
		})
	}
	forwards("a node is behind it", false)
	w.run("ip route replace 192.0.2.1 via 198.51.100.9 dev w0")
	w.must(func(e *Engine) error { _, err := e.FollowDevices(); return err })
	forwards("it is behind another", true)
	w.run("ip route replace 192.0.2.1 dev bare")
	w.must(func(e *Engine) error { _, err := e.FollowDevices(); return err })
	forwards("it is back", false)
}

// Where a route leads by another device, nobody but who follows the devices decides anew who masquerades.
func TestMasqueradeFollowsRoutesBesideAnEdge(t *testing.T) {
	w := newEdgeWorld(t)
	w.run("ip link add w2 type veth peer name w2far && ip link set w2far up && ip link set w2 up")
	w.masqueraded()
	by := func(when, want string) {
		t.Helper()
		w.must(func(e *Engine) error {
			_, err := e.FollowDevices()
			s, unknown := e.masqueradeStatus()
			if s.By != want {
				t.Errorf("%s: by %s, because %q; want %s", when, s.By, s.Because, want)
			}
			return errors.Join(err, unknown)
		})
	}
	for _, nodes := range [][]state.Node{nil, {far("a", "198.51.100.1", "10.9.0.0/24", state.NodeDirect), far("b", "198.51.100.77", "10.8.0.0/24", state.NodeDirect)}} {
		w.apply(state.OwnerCLI, nodes)
		by("all leads by the edge", "ebpf")
		w.run("ip route add 10.66.0.0/24 dev w2")
		by("something does not", "nftables")
		w.run("ip route del 10.66.0.0/24")
		by("all does again", "ebpf")
	}
}

// A program that was a filter while somebody else's was beside it is no filter any more when it has a link.
func TestNoFilterStaysBesideALink(t *testing.T) {
	if !datapath.Probe().TCX {
		t.Skip("this kernel has no tcx")
	}
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	w.tunnelled()
	again := func() {
		t.Helper()
		w.must(func(e *Engine) error {
			return e.changeNodes(func(all store.Nodes) (store.Nodes, error) { return all, nil })
		})
	}
	ours := func() (out []string) {
		for name := range w.filterPrograms() {
			if strings.HasPrefix(name, "mustang:") && strings.HasSuffix(name, " at "+peers.OverlayName) {
				out = append(out, name)
			}
		}
		return out
	}
	w.run("tc qdisc add dev %s clsact", peers.OverlayName)
	addForeignFilter(t, peers.OverlayName)
	again()
	if len(ours()) == 0 {
		t.Error("beside somebody else's filter there is none of ours")
	}
	w.run("tc filter del dev %s ingress", peers.OverlayName)
	again() // ours are gone with it
	addForeignFilter(t, peers.OverlayName)
	again()
	w.run("tc filter del dev %s ingress pref 1", peers.OverlayName)
	again()
	if left := ours(); len(left) > 0 {
		t.Errorf("beside links there are %q", left)
	}
}

// Who takes all filters off the tunnel's device leaves it open to whoever reaches its port: nobody tells of that, and who
// looks at the devices sees it.
func TestProgramsTakenOffTheTunnelComeBack(t *testing.T) {
	n := newNode(t)
	n.opts.NoTCX = true
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	w.tunnelled()
	before := w.filterPrograms()
	w.run("tc qdisc del dev %s clsact", peers.OverlayName)
	for _, want := range []bool{true, false} {
		w.must(func(e *Engine) error {
			changed, err := e.FollowDevices()
			if changed != want {
				t.Errorf("something was to do: %v, want %v", changed, want)
			}
			return err
		})
	}
	after := w.filterPrograms()
	for what := range before {
		if _, back := after[what]; !back {
			t.Errorf("%s is gone", what)
		}
	}
}
