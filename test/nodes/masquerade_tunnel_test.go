// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// A masqueraded pod may have a tunnel of its own. What is inside has a checksum
// that the device is to fill in; the packet around it has a whole one or none,
// which must be right where the device fills in nothing.
func TestATunnelOfAMasqueradedPods(t *testing.T) {
	for _, outer := range []string{"udpcsum", "noudpcsum"} {
		t.Run(outer, func(t *testing.T) {
			m := newMasqueraded(t, lab.Join{Mode: "direct", HostRouting: "ebpf"})
			m.mustang(m.node, "edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire)
			m.pod = m.add("later")
			m.from = podPlace(m.pod)
			if by, because := m.by(); by != "ebpf" {
				t.Fatalf("by %s, because %v", by, because)
			}
			m.must(m.node.Do(func() error { return checksumsInSoftware(lab.Uplink) }))
			for family, ipv6 := range families {
				t.Run(family, func(t *testing.T) { m.on(t, ipv6).tunnels(outer) })
			}
		})
	}
}

// tunnels sends datagrams through a tunnel from the pod to the outside, some of
// them as a bundle, which is cut where it leaves.
func (m masqueraded) tunnels(outer string) {
	m.t.Helper()
	const link = "own0"
	inner := [2]netip.Addr{netip.MustParseAddr("10.77.0.1"), netip.MustParseAddr("10.77.0.2")}
	zero := map[string]string{"udpcsum": "noudp6zerocsumtx noudp6zerocsumrx", "noudpcsum": "udp6zerocsumtx udp6zerocsumrx"}[outer]
	for i, s := range []*lab.Space{&m.pod.Space, &m.outside.Space} {
		m.run(s, "ip link add %s type vxlan id 77 remote %s dstport 14789 %s %s", link, m.ip(m.outside), outer, zero)
		m.t.Cleanup(func() { m.run(s, "ip link del %s", link) })
		m.run(s, "ip link set %s address 02:00:00:00:77:0%d mtu 1300 up", link, i)
		m.run(s, "ip addr add %s/24 dev %s", inner[i], link)
		m.run(s, "ip neigh add %s lladdr 02:00:00:00:77:0%d dev %s", inner[1-i], 1-i, link)
	}
	var server, client net.PacketConn
	m.must(m.outside.Space.Do(func() (err error) {
		server, err = net.ListenPacket("udp", netip.AddrPortFrom(inner[1], serverPort).String())
		return err
	}))
	defer server.Close()
	m.must(m.pod.Space.Do(func() (err error) {
		client, err = net.ListenPacket("udp", netip.AddrPortFrom(inner[0], 0).String())
		return err
	}))
	defer client.Close()

	const segment = 1000
	for _, segments := range []int{1, 3} {
		data := noise(segment * segments)
		oob := make([]byte, unix.CmsgSpace(2))
		h := (*unix.Cmsghdr)(unsafe.Pointer(&oob[0]))
		h.Level, h.Type = unix.SOL_UDP, unix.UDP_SEGMENT
		h.SetLen(unix.CmsgLen(2))
		*(*uint16)(unsafe.Pointer(&oob[unix.CmsgLen(0)])) = segment
		if segments == 1 {
			oob = nil
		}
		_, _, err := client.(*net.UDPConn).WriteMsgUDPAddrPort(data, oob, server.LocalAddr().(*net.UDPAddr).AddrPort())
		m.must(err)
		for i := range segments {
			buf := make([]byte, 2*segment)
			server.SetReadDeadline(time.Now().Add(patience))
			n, _, err := server.ReadFrom(buf)
			if err != nil || !bytes.Equal(buf[:n], data[i*segment:][:segment]) {
				m.t.Fatalf("datagram %d of %d: %d bytes, %v", i+1, segments, n, err)
			}
		}
	}
}

// checksumsInSoftware has the kernel fill in the checksums of what leaves by a
// device of this namespace, as for one that cannot.
func checksumsInSoftware(device string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := struct{ cmd, off uint32 }{unix.ETHTOOL_STXCSUM, 0}
	var request struct {
		name  [unix.IFNAMSIZ]byte
		value unsafe.Pointer
		_     [16]byte
	}
	copy(request.name[:], device)
	request.value = unsafe.Pointer(&value)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return os.NewSyscallError(fmt.Sprintf("ethtool: checksums of %s", device), errno)
	}
	return nil
}
