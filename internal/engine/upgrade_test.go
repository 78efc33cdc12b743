// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// tunnelled has the node be n1 of two, on w0, where the other is w0's far end.
func (w *edgeWorld) tunnelled() {
	w.t.Helper()
	n1 := state.Node{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.1")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}, Mode: state.NodeVXLAN}
	n2 := state.Node{Name: "n2", Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.9")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.10.0.0/24")}, Mode: state.NodeVXLAN}
	w.must(func(e *Engine) error { return e.ApplyNodes(state.OwnerCLI, []state.Node{n1, n2}, peers.SettingsSpec{}) })
}

// filterPrograms are those of the node's filters that are mustang's, by the filter
// and its device, and those that they call, by their slot.
func (w *edgeWorld) filterPrograms() map[string]uint32 {
	w.t.Helper()
	out := map[string]uint32{}
	w.must(func(e *Engine) error {
		links, err := netns.Links()
		for _, l := range links {
			for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
				filters, _ := netns.Filters(l, parent) // without a qdisc there are none
				for _, f := range filters {
					if b, ok := f.(*netlink.BpfFilter); ok && strings.HasPrefix(b.Name, "mustang:") {
						out[b.Name+" at "+l.Attrs().Name] = uint32(b.Id)
					}
				}
			}
		}
		for slot := range uint32(bpfgen.NodeProgCount) {
			var id uint32
			if e.dp.Map(bpfgen.NetdevMapMstNodeProgramsV1).Lookup(slot, &id) == nil {
				out[fmt.Sprintf("slot %d", slot)] = id
			}
		}
		return err
	})
	return out
}

// What filters hold on the node's own devices, and what it calls, is replaced as
// what links hold.
func TestUpgradeReplacesTheFiltersOfTheNodesDevices(t *testing.T) {
	everywhere := []string{"netdev-in at w0", "overlay-in at mst-vxlan", "overlay-edge at mst-vxlan", "overlay-out at mst-vxlan",
		"overlay-turn at mst-vxlan", "door-in at mst-net", "gather-in at " + peers.GatherName}
	for name, c := range map[string]struct {
		noTCX   bool
		filters []string
	}{
		"a kernel without tcx":              {true, everywhere},
		"somebody else's filter at the NIC": {false, everywhere[:1]},
	} {
		t.Run(name, func(t *testing.T) {
			if !c.noTCX && !datapath.Probe().TCX {
				t.Skip("this kernel has no tcx")
			}
			n := newNode(t)
			n.opts.NoTCX = c.noTCX
			w := &edgeWorld{node: n, home: netns.Path(n.name)}
			w.wire(0, 1)
			if !c.noTCX {
				n.run("tc qdisc add dev w0 clsact")
				addForeignFilter(t, "w0")
			}
			if _, err := n.add(n.pod(1)); err != nil {
				t.Fatal(err)
			}
			w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: []string{"w0"}, Host: true}) })
			w.tunnelled()
			w.sctp([]string{"*198.51.100.1:8081"}, []string{"*[2001:db8::1]:8081"})
			before := w.filterPrograms()
			for _, f := range c.filters {
				if _, ok := before["mustang:"+f]; !ok {
					t.Errorf("there is no %s", f)
				}
			}
			n.becomesAnotherBuilds()
			if _, err := n.add(n.pod(2)); err != nil {
				t.Fatal(err)
			}
			after := w.filterPrograms()
			for what, id := range before {
				// What others call has a slot instead of a device; endpoints' filters, which only call, stay.
				asked := strings.HasPrefix(what, "slot") || slices.Contains(c.filters, strings.TrimPrefix(what, "mustang:"))
				if asked && after[what] == id {
					t.Errorf("%s: program %d was not replaced", what, id)
				}
			}
		})
	}
}
