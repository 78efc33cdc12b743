// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Edge is a network whose node has a NIC with the edge's programs. Its test runs
// in a network namespace of its own, where the kernel has routes: so it stays
// within one goroutine.
type Edge struct {
	*Network
	bpfgen.EdgePrograms
	FromTunnel *ebpf.Program // FromOutside at the tunnel's device
	FromDoor   *ebpf.Program // FromOutside at the door
	FromGather *ebpf.Program // where datagrams come back that were put together
	MAC        [6]byte       // of the NIC
	Ifindex    uint32
	Door       uint32 // ifindex of its outer end, for which the NIC's other end stands
}

// NodeNumber is the External address that the node has.
const NodeNumber = 200

// EdgePorts are the ports that flows from outside wear.
var EdgePorts = struct{ First, Count uint16 }{61000, 4536}

// NewEdge is a node with pods 1 to n and a NIC.
func NewEdge(t testing.TB, o Options, n int) *Edge {
	t.Helper()
	e := &Edge{Network: NewNetwork(t, o, n), MAC: [6]byte{2, 0xed, 0, 0, 0, 1}}
	programs := e.load(t, "", bpfgen.NodeProgEdgeIn)
	e.FromOutside, e.ToOutside = programs[bpfgen.EdgeProgFromOutside], programs[bpfgen.EdgeProgToOutside]
	e.FromGather = programs[bpfgen.EdgeProgFromGather]
	if o.NIC {
		e.FromOutside = programs[bpfgen.EdgeProgFromNic]
		e.loadToPodWire(t)
		e.loadNetdev(t)
	}
	e.FromTunnel = e.load(t, bpfgen.EdgeVarFromTunnel, bpfgen.NodeProgEdgeInTunnel)[bpfgen.EdgeProgFromOutside]
	e.FromDoor = e.load(t, bpfgen.EdgeVarFromDoor, bpfgen.NodeProgEdgeInDoor)[bpfgen.EdgeProgFromOutside]
	o.FromEdge, o.InPod = true, false
	toPod := e.loadBeside(t, "to_pod from the edge", func() (*ebpf.CollectionSpec, error) { return toPodAlone(o) })
	check(t, e.MstProgramsV1.Put(uint32(bpfgen.ProgToPodEdge), toPod[bpfgen.PodProgToPod]))
	e.enter(t)
	e.Wear(t, EdgePorts.First, EdgePorts.Count)
	for _, v6 := range []bool{false, true} {
		e.mark(t, e.Node(v6), bpfgen.SvcAddress|bpfgen.SvcNode)
	}
	return e
}

// load puts the programs with this constant 1 in force, and what they call into slot.
func (e *Edge) load(t testing.TB, constant string, slot uint32) map[string]*ebpf.Program {
	t.Helper()
	programs := e.loadBeside(t, "edge "+constant, func() (*ebpf.CollectionSpec, error) {
		spec, err := bpfgen.LoadEdge()
		if err == nil && constant != "" {
			err = spec.Variables[constant].Set(uint8(1))
		}
		return spec, err
	})
	check(t, e.MstNodeProgramsV1.Put(slot, programs[bpfgen.EdgeProgEdgeIn]))
	check(t, e.MstNodeProgramsV1.Put(uint32(bpfgen.NodeProgEdgeOut), programs[bpfgen.EdgeProgEdgeOut]))
	return programs
}

// Tunnel makes External(2) a pod of a node that is reached through the tunnel,
// and returns the address that this node has in it.
func (e *Edge) Tunnel(t testing.TB, v6 bool) netip.Addr {
	t.Helper()
	var own bpfgen.PodEdgeConfig
	check(t, e.MstEdgeV2.Lookup(uint32(bpfgen.EdgeTunnel), &own))
	a := External(201, v6)
	if v6 {
		own.Ip6 = toAddr(a)
	} else {
		own.Ip4 = toAddr(a)
	}
	check(t, e.MstEdgeV2.Put(uint32(bpfgen.EdgeTunnel), own))
	e.putRemote(t, 3, bpfgen.PodRemote{Ref: 1<<16 | 3, Flags: bpfgen.RemoteTunnel})
	check(t, e.MstRemoteNetsV1.Put(bpfgen.PodPrefix{Length: 128, Addr: External(2, v6).As16()}, uint32(1<<16|3)))
	return a
}

// Node is the node's own address.
func (e *Edge) Node(v6 bool) netip.Addr { return External(NodeNumber, v6) }

// Wear says which ports flows from outside wear.
func (e *Edge) Wear(t testing.TB, first, count uint16) {
	t.Helper()
	check(t, e.MstEdgeV2.Put(uint32(bpfgen.EdgeWire), bpfgen.PodEdgeConfig{
		Ip4: toAddr(e.Node(false)), Ip6: toAddr(e.Node(true)), PortFirst: first, PortCount: count, Door: e.Door}))
}

// enter puts the test's thread, which dies with it, into a namespace with the NIC.
func (e *Edge) enter(t testing.TB) {
	t.Helper()
	runtime.LockOSThread()
	check(t, unix.Unshare(unix.CLONE_NEWNET))
	for _, family := range []string{"ipv4", "ipv6"} {
		check(t, os.WriteFile("/proc/sys/net/"+family+"/conf/all/forwarding", []byte("1"), 0))
	}
	l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "nic", HardwareAddr: net.HardwareAddr(e.MAC[:])}, PeerName: "wire"}
	check(t, netlink.LinkAdd(l))
	for _, name := range []string{"lo", "nic", "wire"} {
		up, err := netlink.LinkByName(name)
		check(t, err)
		check(t, netlink.LinkSetUp(up))
	}
	for _, v6 := range []bool{false, true} {
		ownAddress(t, l, netip.PrefixFrom(e.Node(v6), e.Node(v6).BitLen()-8))
	}
	e.Ifindex = uint32(l.Attrs().Index)
	outer, err := netlink.LinkByName("wire")
	check(t, err)
	e.Door = uint32(outer.Attrs().Index)
}

// ownAddress gives a link an address, and returns when routes lead there: the kernel
// makes the local route of an IPv6 address later than the address, without DAD, too.
func ownAddress(t testing.TB, l netlink.Link, p netip.Prefix) {
	t.Helper()
	a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	check(t, netlink.AddrReplace(l, a))
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		routes, err := netlink.RouteGet(p.Addr().AsSlice())
		if err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v has no local route: %v, %v", p, routes, err)
		}
	}
}

// Arrive lets a frame come in at the NIC, and follows it: out again, into a pod,
// or, with pod 0 and Direct false, to the node's own stack.
func (e *Edge) Arrive(frame []byte) (Arrival, error) {
	return e.in(e.FromOutside, frame)
}

// ArriveByTunnel is Arrive at the tunnel's device.
func (e *Edge) ArriveByTunnel(frame []byte) (Arrival, error) {
	return e.in(e.FromTunnel, frame)
}

// Enter lets a frame of the node's own come out of the door.
func (e *Edge) Enter(frame []byte) (Arrival, error) {
	return e.in(e.FromDoor, frame)
}

func (e *Edge) in(p *ebpf.Program, frame []byte) (Arrival, error) {
	r, err := e.Run(p, frame, Context{Ifindex: e.Ifindex})
	if err != nil {
		return Arrival{}, err
	}
	return e.follow(r)
}

// Answer lets pod p send a frame that should leave the node by the NIC.
func (e *Edge) Answer(p Pod, frame []byte) (Arrival, error) {
	r, err := e.Run(e.PodPrograms.FromPod, frame, Context{Endpoint: p.ID, Ifindex: e.Ifindex})
	if err != nil {
		return Arrival{}, err
	}
	return e.follow(r)
}

// Leave lets a frame of the node's own pass the NIC's egress.
func (e *Edge) Leave(frame []byte) (Arrival, error) {
	r, err := e.Run(e.ToOutside, frame, Context{Ifindex: e.Ifindex})
	return arrived(r, 0), err
}

func (e *Edge) follow(r Result) (Arrival, error) {
	a := arrived(r, 0)
	if a.Dropped != "" || r.Verdict != Redirect {
		return a, nil
	}
	a.Direct = true
	switch r.RedirectKind {
	case bpfgen.RedirectNeigh:
		if a.Home = r.RedirectIfindex == e.Door; a.Home {
			return a, nil
		}
		if r.RedirectIfindex != e.Ifindex {
			return a, fmt.Errorf("out of interface %d, want the NIC, %d", r.RedirectIfindex, e.Ifindex)
		}
		return a, nil
	case bpfgen.RedirectPeer:
		for _, to := range e.Pods {
			if to.Ifindex == r.RedirectIfindex {
				if [6]byte(r.Packet) != to.MAC {
					return a, fmt.Errorf("link address %x, want %x", r.Packet[:6], to.MAC)
				}
				a.Pod = to.ID
				return a, nil
			}
		}
	}
	return a, fmt.Errorf("%v goes nowhere", r)
}
