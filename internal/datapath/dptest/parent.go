// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Parent is the program at the egress of a link whose children are pods, over
// the tables of a Datapath. A test run's packet has a socket, of the namespace
// that the test is in: what the program takes for the node's own says whether
// it is the node's or a pod's.
type Parent struct {
	*ebpf.Program
	d *Datapath
}

// LoadParent makes node the cookie of the node's own namespace.
func (d *Datapath) LoadParent(t testing.TB, node uint64) *Parent {
	t.Helper()
	programs := d.loadBeside(t, fmt.Sprintf("parent of %d", node), func() (*ebpf.CollectionSpec, error) {
		spec, err := bpfgen.LoadParent()
		if err != nil {
			return nil, err
		}
		return spec, spec.Variables["node_netns"].Set(node)
	})
	return &Parent{programs[bpfgen.ParentProgParentEgress], d}
}

// SetParent makes the link with this ifindex a parent.
func (d *Datapath) SetParent(t testing.TB, ifindex int, mac [6]byte, shared bool) {
	t.Helper()
	record := bpfgen.PodParent{Mac: mac}
	if shared {
		record.SharedMac = 1
	}
	check(t, d.MstParentsV1.Put(uint32(ifindex), record))
}

// SetChild makes an endpoint's MAC address known behind its parent; id 0 is the node's own.
func (d *Datapath) SetChild(t testing.TB, ifindex int, mac [6]byte, id uint32) {
	t.Helper()
	check(t, d.MstChildrenV1.Put(datapath.ChildOf(ifindex, mac[:]), id))
}

// SetOwnChild makes child, an ifindex, one of the node's own.
func (d *Datapath) SetOwnChild(t testing.TB, ifindex, child int) {
	t.Helper()
	check(t, d.MstChildrenV1.Put(datapath.OwnChildOf(ifindex, child), uint32(0)))
}

// SetNetns gives a pod's endpoint a namespace.
func (d *Datapath) SetNetns(t testing.TB, p Pod, cookie uint64) {
	t.Helper()
	var e bpfgen.PodEndpoint
	check(t, d.MstEndpointsV1.Lookup(p.ID, &e))
	e.NetnsCookie = cookie
	d.putEndpoint(t, p.ID, e)
	check(t, d.MstNetnsV1.Put(cookie, bpfgen.PodNetnsInfo{Endpoint: p.ID, Flags: uint32(e.Flags)}))
}

// Forwarder is a program that sends a copy of its packet out of a link. Unlike
// the packet of a test run, a copy has no socket: the link's egress sees it as
// it sees what the kernel forwards.
func Forwarder(ifindex int) (*ebpf.Program, error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:    ebpf.SchedCLS,
		License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R2, int32(ifindex)),
			asm.Mov.Imm(asm.R3, 0),
			asm.FnCloneRedirect.Call(),
			asm.Return(),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("load the forwarding program: %w", err)
	}
	return p, nil
}

// ARP is an ARP request in which sender asks for target.
func ARP(mac [6]byte, sender, target netip.Addr) []byte {
	body := []byte{0, 1, 8, 0, 6, 4, 0, 1}
	body = append(append(body, mac[:]...), sender.AsSlice()...)
	body = append(append(body, make([]byte, 6)...), target.AsSlice()...)
	return Eth(mac, [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}).Raw(0x0806, body)
}
