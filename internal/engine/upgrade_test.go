// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

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

// Who comes after an upgrade that has failed, or was killed, in the middle replaces all programs, be it the build of
// before: some are not its own.
func TestAfterAnUpgradeThatFailedProgramsAreNobodys(t *testing.T) {
	n := newNode(t)
	if _, err := n.add(n.pod(1)); err != nil {
		t.Fatal(err)
	}
	build := func() (b [32]byte) {
		n.must(func(e *Engine) error {
			meta, err := e.dp.GetMeta()
			b = meta.Build
			return err
		})
		return b
	}
	own := build()
	n.becomesAnotherBuilds()
	other := build()
	pin, aside := filepath.Join(n.scope.BPFFS, "links", "sock-connect4"), filepath.Join(n.scope.BPFFS, "aside")
	in, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := errors.Join(os.Rename(pin, aside), in.Pin(pin)); err != nil { // no link: the upgrade ends there
		t.Fatal(err)
	}
	upgrade := func() (upgraded bool, err error) {
		n.must(func(e *Engine) error { upgraded, err = e.Upgrade(); return nil })
		return upgraded, err
	}
	if _, err := upgrade(); err == nil {
		t.Error("an upgrade goes on where no link is")
	}
	if b := build(); b == own || b == other {
		t.Errorf("programs of two builds are said to be of one: ours %v, the other's %v", b == own, b == other)
	}
	if err := errors.Join(os.Remove(pin), os.Rename(aside, pin)); err != nil {
		t.Fatal(err)
	}
	if upgraded, err := upgrade(); !upgraded || err != nil || build() != own {
		t.Errorf("the next upgrade: %v, %v", upgraded, err)
	}
}

// A cgroup root that is set anew is in force with the next agent, not with the next reset.
func TestSocketsFollowTheCgroupRoot(t *testing.T) {
	n := newNode(t)
	roots := [2]string{filepath.Join(n.scope.CgroupRoot, "a"), filepath.Join(n.scope.CgroupRoot, "b")}
	for _, root := range roots {
		if err := os.Mkdir(root, 0o755); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(root)
	}
	n.scope.CgroupRoot = roots[0]
	if _, err := n.add(n.pod(1)); err != nil {
		t.Fatal(err)
	}
	at := func() map[uint64]int {
		t.Helper()
		out := map[uint64]int{}
		pins, err := filepath.Glob(filepath.Join(n.scope.BPFFS, "links", "sock-*"))
		for _, pin := range pins {
			l, unread := link.LoadPinnedLink(pin, nil)
			if err = errors.Join(err, unread); err != nil {
				t.Fatal(err)
			}
			info, unread := l.Info()
			if err = errors.Join(unread, l.Close()); err != nil {
				t.Fatal(err)
			}
			out[info.Cgroup().CgroupId]++
		}
		return out
	}
	for _, root := range []string{roots[0], roots[1], roots[0]} {
		n.scope.CgroupRoot = root
		was := at()
		var stat unix.Stat_t
		if err := unix.Stat(root, &stat); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			n.must(func(e *Engine) error {
				moved, err := e.MoveSockets()
				if wanted := was[stat.Ino] == 0; moved != wanted {
					t.Errorf("%s: moved %v, want %v", root, moved, wanted)
				}
				return err
			})
			if was = at(); len(was) != 1 || was[stat.Ino] != 9 {
				t.Errorf("%s: programs are at cgroups %v, want 9 at %d", root, was, stat.Ino)
			}
		}
	}
	n.must(func(e *Engine) error { return e.Reset() })
}
