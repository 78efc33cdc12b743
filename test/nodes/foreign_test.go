// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// counting is somebody else's program: it counts packets and lets them go on.
func counting(t *testing.T) (*ebpf.Program, func() uint64) {
	t.Helper()
	table, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{
			asm.LoadMapValue(asm.R1, table.FD(), 0),
			asm.Mov.Imm(asm.R2, 1),
			asm.StoreXAdd(asm.R1, asm.R2, asm.DWord),
			asm.Mov.Imm(asm.R0, -1), // TC_ACT_UNSPEC
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close(); table.Close() })
	return prog, func() (n uint64) {
		if err := table.Lookup(uint32(0), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
}

func attachTCX(prog *ebpf.Program, index int) (link.Link, error) {
	return link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: ebpf.AttachTCXIngress})
}

func attachFilter(prog *ebpf.Program, index int) error {
	qdisc := &netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	if err := netlink.QdiscAdd(qdisc); err != nil {
		return err
	}
	return netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 10},
		Fd:          prog.FD(), Name: "foreign", DirectAction: true,
	})
}

// Somebody else's program at the NIC's ingress sees pods' packets before mustang
// takes them, and is there when mustang has gone.
func TestForeignProgramsStayAndSeePackets(t *testing.T) {
	for _, how := range []string{"tcx", "clsact"} {
		t.Run(how, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: "direct", HostRouting: "legacy"})
			first := w.lab.Nodes()[0]
			prog, seen := counting(t)
			w.must(first.Do(func() error {
				l, err := netlink.LinkByName(lab.Wire)
				if err != nil {
					return err
				}
				if how == "clsact" {
					return attachFilter(prog, l.Attrs().Index)
				}
				held, err := attachTCX(prog, l.Attrs().Index)
				if err == nil {
					t.Cleanup(func() { held.Close() })
				}
				return err
			}))
			w.must(w.lab.Join(deadline(t), lab.Join{Mode: "direct", HostRouting: "ebpf"}))
			w.run(&first.Space, "nft add table inet see")
			w.run(&first.Space, "nft add chain inet see f { type filter hook forward priority 0 ; }")
			w.run(&first.Space, "nft add rule inet see f counter")
			before := seen()
			w.tcp(w.far, w.direct(w.far))
			if now := seen(); now == before {
				t.Error("the foreign program saw nothing of a pod's connection")
			}
			if f := w.run(&first.Space, "nft list chain inet see f"); !strings.Contains(f, "packets 0 ") {
				t.Errorf("mustang's program did not have its turn:\n%s", f)
			}
			w.mustang(first, "node", "set", "--host-routing", "legacy")
			before = seen()
			w.tcp(w.far, w.direct(w.far))
			if now := seen(); now == before {
				t.Error("the foreign program went with mustang's")
			}
			if f := w.run(&first.Space, "nft list chain inet see f"); strings.Contains(f, "packets 0 ") {
				t.Error("mustang's program is still there")
			}
		})
	}
}
