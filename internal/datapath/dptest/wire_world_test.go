// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// Nodes as these tests have them: "here" has pods 10.0.0.x, and "there" pods
// 10.9.0.x; both have an address of each family on the wire.
const (
	thereRef = 7<<16 | 3
	otherRef = 8<<16 | 4
	tunnelID = 42
	udpPort  = 4789
	wireMTU  = 1500
	nodeKey  = 0x5eed

	overlayIndex = 77 // the tunnel's device
)

var thereMAC = [6]byte{2, 0x6d, 1, 2, 3, 4}

func wireAddr(n byte, v6 bool) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x99, 15: n})
	}
	return netip.AddrFrom4([4]byte{192, 0, 2, n})
}

// farPod is a pod of node there (net 9) or of the other one (net 8).
func farPod(network byte, v6 bool) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0: 0xfd, 1: network, 15: 5})
	}
	return netip.AddrFrom4([4]byte{10, network, 0, 5})
}

// netOf is the network of a node's pods.
func netOf(pod netip.Addr) bpfgen.PodPrefix {
	if pod.Is6() {
		return bpfgen.PodPrefix{Length: 16, Addr: pod.As16()}
	}
	return bpfgen.PodPrefix{Length: 96 + 16, Addr: pod.As16()}
}

// wireNode is a node with pods and the programs of its own devices.
type wireNode struct {
	*Network
	netdev, toOverlay, fromOverlay *ebpf.Program
}

// newWireNode is node "here": over is the family of the tunnel, and node there is
// in it when tunnel is set.
func newWireNode(t *testing.T, tunnel, over6 bool) *wireNode {
	t.Helper()
	n := &wireNode{Network: NewNetwork(t, Options{}, 2)}
	n.loadToPodWire(t)
	n.netdev = n.loadNetdev(t)[bpfgen.NetdevProgFromNetdev]
	overlay := n.loadBeside(t, "overlay", bpfgen.LoadOverlay)
	n.toOverlay, n.fromOverlay = overlay[bpfgen.OverlayProgToOverlay], overlay[bpfgen.OverlayProgFromOverlay]
	n.join(t, tunnel, over6)
	return n
}

func (n *wireNode) join(t *testing.T, tunnel, over6 bool) {
	t.Helper()
	check(t, n.MstNodeV1.Put(uint32(0), bpfgen.PodNodeConfig{
		Flags: bpfgen.NodeEbpf, Overlay: overlayIndex, Vni: tunnelID, Port: port(udpPort), Key: nodeKey,
		Ip4: toAddr(wireAddr(1, false)), Ip6: toAddr(wireAddr(1, true)),
	}))
	for i, ref := range []uint32{thereRef, otherRef} {
		r := bpfgen.PodRemote{Ref: ref, Mac: thereMAC}
		if tunnel {
			r.Flags, r.Addr = bpfgen.RemoteTunnel, toAddr(wireAddr(byte(2+i), over6))
		}
		n.putRemote(t, ref&0xffff, r)
		for _, v6 := range []bool{false, true} {
			check(t, n.MstRemoteNetsV1.Put(netOf(farPod(byte(9-i), v6)), ref))
			check(t, n.MstTunnelPeersV1.Put(toAddr(wireAddr(byte(2+i), v6)), ref))
		}
	}
}

// onWire runs the rest of the test where routes to node there and its pods lead
// by an interface with an MTU, and returns its index.
func onWire(t *testing.T) (ifindex uint32) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a network namespace needs root")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test's goroutine
	check(t, unix.Unshare(unix.CLONE_NEWNET))
	for _, key := range []string{"ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding"} {
		check(t, os.WriteFile("/proc/sys/net/"+key, []byte("1"), 0))
	}
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	check(t, netlink.LinkSetUp(lo))
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "wire0", wireMTU
	check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far0"}))
	wire, err := netlink.LinkByName("wire0")
	check(t, err)
	check(t, netlink.LinkSetUp(wire))
	giveRoutes(t, wire)
	return uint32(wire.Attrs().Index)
}

// giveRoutes gives the interface its addresses and routes, which it loses when it
// goes down.
func giveRoutes(t *testing.T, wire netlink.Link) {
	t.Helper()
	for _, v6 := range []bool{false, true} {
		ownAddress(t, wire, netip.PrefixFrom(wireAddr(1, v6), 24))
		pods := &net.IPNet{IP: farPod(9, v6).AsSlice(), Mask: net.CIDRMask(16, wireAddr(1, v6).BitLen())}
		pods.IP = pods.IP.Mask(pods.Mask)
		check(t, netlink.RouteReplace(&netlink.Route{LinkIndex: wire.Attrs().Index, Dst: pods, Gw: wireAddr(2, v6).AsSlice()}))
	}
}

// eachFamily runs fn for packets of both.
func eachFamily(t *testing.T, fn func(t *testing.T, v6 bool)) {
	for name, v6 := range map[string]bool{"ipv4": false, "ipv6": true} {
		t.Run(name, func(t *testing.T) { fn(t, v6) })
	}
}

// tunnelled is how a packet looks in the tunnel.
type tunnelled struct {
	src, dst netip.Addr
	vni      uint32
	port     uint16
	tos      uint8
	frag     bool
}

// wrap puts a frame into the tunnel: its link header becomes the inner one.
func (w tunnelled) wrap(frame []byte) []byte {
	vxlan := binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, w.vni<<8)
	p := Eth([6]byte{2, 1}, [6]byte{}).IP(w.src, w.dst)
	if w.frag {
		p.Fragment(0, true, 9)
	}
	p.UDP(50000, w.port).Data(append(vxlan, frame...)).NoSum()
	if w.tos != 0 && w.src.Is4() {
		p.Byte(1, w.tos)
		p.BadIPSum() // nobody here looks
	}
	if w.tos != 0 && !w.src.Is4() {
		p.Byte(0, 0x60|w.tos>>4).Byte(1, w.tos<<4)
	}
	return p.Frame()
}

// unwrap takes a frame out of the tunnel.
func unwrap(t *testing.T, frame []byte) (w tunnelled, sport uint16, inner []byte) {
	t.Helper()
	l4 := 34
	if frame[14]>>4 == 6 { // the link header is the neighbour's, who is found later
		l4 = 54
		w.src, _ = netip.AddrFromSlice(frame[22:38])
		w.dst, _ = netip.AddrFromSlice(frame[38:54])
		if int(binary.BigEndian.Uint16(frame[18:])) != len(frame)-54 {
			t.Errorf("outer length %d of %d bytes", binary.BigEndian.Uint16(frame[18:]), len(frame))
		}
	} else {
		w.src, _ = netip.AddrFromSlice(frame[26:30])
		w.dst, _ = netip.AddrFromSlice(frame[30:34])
		if int(binary.BigEndian.Uint16(frame[16:])) != len(frame)-14 {
			t.Errorf("outer length %d of %d bytes", binary.BigEndian.Uint16(frame[16:]), len(frame))
		}
	}
	udp := frame[l4:]
	w.port = binary.BigEndian.Uint16(udp[2:])
	w.vni = binary.BigEndian.Uint32(udp[12:]) >> 8
	if int(binary.BigEndian.Uint16(udp[4:])) != len(udp) || udp[8] != 8 {
		t.Errorf("UDP length %d of %d bytes, VXLAN flags %#x", binary.BigEndian.Uint16(udp[4:]), len(udp), udp[8])
	}
	return w, binary.BigEndian.Uint16(udp), udp[16:]
}
