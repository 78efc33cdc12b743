// SPDX-License-Identifier: Apache-2.0

// Features of the network: hooks that see a packet, devices, tunnels, sockets.
// Every function here runs in a network namespace of its own (see inNetns).

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// probeProto is an EtherType for local experiments (IEEE 802, "Local Experimental Ethertype 1").
const probeProto = 0x88b5

func up(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	return netlink.LinkSetUp(l)
}

// add makes a device, brings it up and returns it with its index.
func add(l netlink.Link) (netlink.Link, error) {
	if err := netlink.LinkAdd(l); err != nil {
		return nil, fmt.Errorf("add %s (%s): %w", l.Attrs().Name, l.Type(), err)
	}
	made, err := netlink.LinkByName(l.Attrs().Name)
	if err != nil {
		return nil, err
	}
	return made, netlink.LinkSetUp(made)
}

func named(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	return a
}

// vethPair makes two connected devices, both up.
func vethPair(a, b string) (la, lb netlink.Link, err error) {
	if la, err = add(&netlink.Veth{LinkAttrs: named(a), PeerName: b}); err != nil {
		return nil, nil, err
	}
	if err = up(b); err == nil {
		lb, err = netlink.LinkByName(b)
	}
	return la, lb, err
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// packetSocket is bound to the device and to probeProto.
func packetSocket(l netlink.Link) (int, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(probeProto)))
	if err != nil {
		return -1, fmt.Errorf("open a packet socket: %w", err)
	}
	addr := &unix.SockaddrLinklayer{Protocol: htons(probeProto), Ifindex: l.Attrs().Index}
	if err := unix.Bind(fd, addr); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind a packet socket to %s: %w", l.Attrs().Name, err)
	}
	return fd, nil
}

// sendFrame sends one broadcast frame out of the device.
func sendFrame(l netlink.Link) error {
	fd, err := packetSocket(l)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	frame := make([]byte, pktLen)
	copy(frame, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, probeProto >> 8, probeProto & 0xff})
	if _, err := unix.Write(fd, frame); err != nil {
		return fmt.Errorf("send a frame out of %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// awaitCount waits for the counter's first packet.
func awaitCount(c *counter) error {
	deadline := time.Now().Add(2 * time.Second)
	for {
		err := c.ran()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// countOnVeth attaches a counter to one end of a veth pair, sends a frame from
// the other and waits for it to be counted.
func countOnVeth(t ebpf.ProgramType, verdict int32, attach func(*ebpf.Program, netlink.Link) error) error {
	a, b, err := vethPair("a", "b")
	if err != nil {
		return err
	}
	c, err := newCounter(t, verdict)
	if err != nil {
		return err
	}
	defer c.close()
	if err := attach(c.prog, b); err != nil {
		return err
	}
	if err := sendFrame(a); err != nil {
		return err
	}
	return awaitCount(c)
}

// The links below are left open on purpose: they end with the namespace's devices.

func attachTCX(prog *ebpf.Program, l netlink.Link) error {
	_, err := link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: prog, Attach: ebpf.AttachTCXIngress})
	return err
}

func attachClsact(prog *ebpf.Program, l netlink.Link) error {
	attrs := netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
	if err := netlink.QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: attrs, QdiscType: "clsact"}); err != nil {
		return fmt.Errorf("add clsact: %w", err)
	}
	filter := &netlink.BpfFilter{
		FilterAttrs:  netlink.FilterAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Protocol: unix.ETH_P_ALL},
		Fd:           prog.FD(),
		Name:         "probe",
		DirectAction: true,
	}
	if err := netlink.FilterAdd(filter); err != nil {
		return fmt.Errorf("add a cls_bpf filter: %w", err)
	}
	return nil
}

func attachXDP(prog *ebpf.Program, l netlink.Link) error {
	_, err := link.AttachXDP(link.XDPOptions{Interface: l.Attrs().Index, Program: prog, Flags: link.XDPDriverMode})
	return err
}

func tcxCounts() error    { return countOnVeth(ebpf.SchedCLS, actOK, attachTCX) }
func clsactCounts() error { return countOnVeth(ebpf.SchedCLS, actOK, attachClsact) }
func xdpCounts() error    { return countOnVeth(ebpf.XDP, xdpOK, attachXDP) }

// netkitCounts sends a packet out of an l2 netkit device whose program counts it.
func netkitCounts() error {
	nk := &netlink.Netkit{LinkAttrs: named("nk0"), Mode: netlink.NETKIT_MODE_L2, Policy: netlink.NETKIT_POLICY_FORWARD, PeerPolicy: netlink.NETKIT_POLICY_FORWARD}
	peer := named("nk1")
	nk.SetPeerAttrs(&peer)
	l, err := add(nk)
	if err != nil {
		return err
	}
	if l.Type() != "netkit" {
		return fmt.Errorf("asked for a netkit device, got %s", l.Type())
	}
	if err := up("nk1"); err != nil {
		return err
	}
	c, err := newCounter(ebpf.SchedCLS, actOK)
	if err != nil {
		return err
	}
	defer c.close()
	if _, err := link.AttachNetkit(link.NetkitOptions{Interface: l.Attrs().Index, Program: c.prog, Attach: ebpf.AttachNetkitPrimary}); err != nil {
		return fmt.Errorf("attach to netkit: %w", err)
	}
	if err := sendFrame(l); err != nil {
		return err
	}
	return awaitCount(c)
}

// redirectPeer sends a frame into the host end of one veth pair, whose program
// hands it to the pod end of another, in another namespace, without passing that
// pair's host end.
func redirectPeer() error {
	a, b, err := vethPair("a", "b")
	if err != nil {
		return err
	}
	host, pod, err := vethPair("host", "pod")
	if err != nil {
		return err
	}
	prog, err := load(ebpf.SchedCLS, asm.Instructions{
		asm.Mov.Imm(asm.R1, int32(host.Attrs().Index)),
		asm.Mov.Imm(asm.R2, 0),
		asm.FnRedirectPeer.Call(),
		asm.Return(),
	})
	if err != nil {
		return err
	}
	defer prog.Close()
	if err := attachClsact(prog, b); err != nil {
		return err
	}
	return crossingNetns(pod, func() error { return sendFrame(a) })
}

// crossingNetns moves the device to a new namespace and wants what send sends
// to arrive there. A socket stays in the namespace it was opened in, so the
// thread itself can come back to send.
func crossingNetns(pod netlink.Link, send func() error) error {
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer home.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	away, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer away.Close()
	if err := enter(home); err != nil {
		return err
	}
	if err := netlink.LinkSetNsFd(pod, int(away.Fd())); err != nil {
		return fmt.Errorf("move %s: %w", pod.Attrs().Name, err)
	}
	if err := enter(away); err != nil {
		return err
	}
	fd, err := packetSocketUp(pod.Attrs().Name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := enter(home); err != nil {
		return err
	}
	if err := send(); err != nil {
		return err
	}
	return receive(fd)
}

// enter takes the thread into a network namespace.
func enter(ns *os.File) error {
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter a network namespace: %w", err)
	}
	return nil
}

// packetSocketUp brings the device up and opens a packet socket on it.
func packetSocketUp(name string) (int, error) {
	if err := up(name); err != nil {
		return -1, err
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		return -1, err
	}
	return packetSocket(l)
}

// receive waits for one packet.
func receive(fd int) error {
	timeout := unix.Timeval{Sec: 2}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return err
	}
	if _, err := unix.Read(fd, make([]byte, 2*pktLen)); err != nil {
		return fmt.Errorf("no packet arrived: %w", err)
	}
	return nil
}

func ipvlanModes() error {
	for i, mode := range []netlink.IPVlanMode{netlink.IPVLAN_MODE_L2, netlink.IPVLAN_MODE_L3, netlink.IPVLAN_MODE_L3S} {
		parent, err := add(&netlink.Dummy{LinkAttrs: named(fmt.Sprintf("parent%d", i))})
		if err != nil {
			return err
		}
		attrs := named(fmt.Sprintf("ipvl%d", i))
		attrs.ParentIndex = parent.Attrs().Index
		if _, err := add(&netlink.IPVlan{LinkAttrs: attrs, Mode: mode}); err != nil {
			return err
		}
	}
	return nil
}

func macvlan() error {
	parent, err := add(&netlink.Dummy{LinkAttrs: named("parent")})
	if err != nil {
		return err
	}
	attrs := named("macvl")
	attrs.ParentIndex = parent.Attrs().Index
	_, err = add(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE})
	return err
}

func wireguard() error {
	_, err := add(&netlink.Wireguard{LinkAttrs: named("wg0")})
	return err
}

// espState adds one security association; the kernel builds its cipher at once.
func espState() error {
	return netlink.XfrmStateAdd(&netlink.XfrmState{
		Src: net.IPv4(192, 0, 2, 1), Dst: net.IPv4(192, 0, 2, 2),
		Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Spi: 256,
		Aead: &netlink.XfrmStateAlgo{Name: "rfc4106(gcm(aes))", Key: make([]byte, 20), ICVLen: 128},
	})
}

// bigTCPv4 reads back what it sets: older kernels ignore the attribute in silence.
func bigTCPv4() error {
	const size = 128 << 10
	l, _, err := vethPair("a", "b")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetGSOIPv4MaxSize(l, size); err != nil {
		return err
	}
	if l, err = netlink.LinkByName("a"); err != nil {
		return err
	}
	if got := l.Attrs().GSOIPv4MaxSize; got != size {
		return fmt.Errorf("gso_ipv4_max_size is %d after setting %d", got, size)
	}
	return nil
}

func netnsCookie() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err == nil && cookie == 0 {
		err = errors.New("the cookie is 0")
	}
	return err
}

// connectHook attaches a program by bpf_link (not by the older attach, which no
// link update can replace atomically) and wants it to refuse a connection.
func connectHook() error {
	cgroup, err := os.Open("/sys/fs/cgroup")
	if err != nil {
		return err
	}
	defer cgroup.Close()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "Dual MIT/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return err
	}
	defer prog.Close()
	l, err := link.AttachRawLink(link.RawLinkOptions{Target: int(cgroup.Fd()), Program: prog, Attach: ebpf.AttachCGroupInet4Connect})
	if err != nil {
		return err
	}
	defer l.Close()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 9})
	if !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("connect was not refused: %v", err)
	}
	return nil
}
