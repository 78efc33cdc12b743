// SPDX-License-Identifier: Apache-2.0

package node

// Does the wire carry what its devices promise? Two echoes to each node: a small
// one, and one as long as the MTU that may not be cut.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/state"
)

const (
	probeTimeout = 400 * time.Millisecond
	probesAtOnce = 64
	echoHeader   = 8
	probeSmall   = 64 // bytes of a packet that every wire carries
)

// Probe is what came of one address.
type Probe struct {
	Node    string     `json:"node"`
	Address netip.Addr `json:"address"`
	MTU     int        `json:"mtu"` // that the route there, or its device, promises
	Fault   string     `json:"fault,omitempty"`
}

// ProbeWire asks all addresses of remotes at once.
func ProbeWire(remotes []state.Node) []Probe {
	var out []Probe
	for _, n := range remotes {
		for _, a := range n.Addrs {
			mtu, err := pathMTU(a)
			if err == nil && mtu > 0 { // else this node has no way of that family
				out = append(out, Probe{Node: n.Name, Address: a, MTU: mtu})
			}
		}
	}
	slots := make(chan struct{}, probesAtOnce)
	var wg sync.WaitGroup
	for i := range out {
		wg.Go(func() {
			slots <- struct{}{}
			out[i].run(uint16(os.Getpid()), uint16(i))
			<-slots
		})
	}
	wg.Wait()
	return out
}

func (p *Probe) run(id, seq uint16) {
	small, err := echo(p.Address, probeSmall, id, 2*seq)
	if err == nil && !small {
		p.Fault = "does not answer an echo"
		return
	}
	whole := false
	if err == nil {
		whole, err = echo(p.Address, p.MTU, id, 2*seq+1)
	}
	switch {
	case err != nil:
		p.Fault = err.Error()
	case !whole:
		p.Fault = fmt.Sprintf("answers, but not %d bytes, which the device's MTU promises: something on the way takes less", p.MTU)
	}
}

// echo says whether a packet of length bytes, which nobody may cut, is answered.
func echo(to netip.Addr, length int, id, seq uint16) (answered bool, err error) {
	network, level, option, value, header := "ip4:icmp", unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE, 20
	request, reply := byte(8), byte(0)
	if to.Is6() {
		network, level, option, value, header = "ip6:ipv6-icmp", unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE, 40
		request, reply = 128, 129
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		outer := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, value) })
		return errors.Join(outer, err)
	}}
	s, err := config.ListenPacket(context.Background(), network, "")
	if err != nil {
		return false, fmt.Errorf("cannot be asked: %w", err)
	}
	defer s.Close()
	message := make([]byte, max(length-header, echoHeader))
	message[0] = request
	binary.BigEndian.PutUint16(message[4:], id)
	binary.BigEndian.PutUint16(message[6:], seq)
	if to.Is4() { // the kernel does it for IPv6
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	s.SetDeadline(time.Now().Add(probeTimeout))
	if _, err := s.WriteTo(message, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return false, nil // it does not even leave
	}
	buf := make([]byte, 65536)
	for {
		n, from, err := s.ReadFrom(buf)
		if err != nil {
			return false, nil
		}
		a, ok := netip.AddrFromSlice(from.(*net.IPAddr).IP)
		if ok && a.Unmap() == to && n >= echoHeader && buf[0] == reply &&
			binary.BigEndian.Uint16(buf[4:]) == id && binary.BigEndian.Uint16(buf[6:]) == seq {
			return true, nil
		}
	}
}

// checksum is RFC 1071's, of a message whose own is zero.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
