// SPDX-License-Identifier: Apache-2.0

package node

// Does the wire carry what its devices promise? Two echoes to each node: a small
// one, and one as long as the MTU that may not be cut.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/state"
)

const (
	probeTimeout = 400 * time.Millisecond // from when the last node was asked
	echoHeader   = 8
	probeSmall   = 64       // bytes of a packet that every wire carries
	probeRoom    = 16 << 20 // bytes of the kernel's, for echoes that wait
)

// Probe is what came of one address.
type Probe struct {
	Node    string     `json:"node"`
	Address netip.Addr `json:"address"`
	MTU     int        `json:"mtu"` // that the route there, or its device, promises
	Fault   string     `json:"fault,omitempty"`
}

// ProbeWire asks all addresses of remotes at once: however many there are, and whether
// or not they answer, it takes hardly more than twice the time-out.
func ProbeWire(remotes []state.Node) []Probe {
	out := []Probe{}
	for _, n := range remotes {
		for _, a := range n.Addrs {
			mtu, err := pathMTU(a)
			if err == nil && mtu > 0 { // else this node has no way of that family
				out = append(out, Probe{Node: n.Name, Address: a, MTU: mtu})
			}
		}
	}
	small := func(*Probe) int { return probeSmall }
	whole := func(p *Probe) int { return p.MTU }
	askEach(out, small, func(*Probe) string { return "does not answer an echo" })
	askEach(out, whole, func(p *Probe) string {
		return fmt.Sprintf("answers, but not %d bytes, which the device's MTU promises: something on the way takes less", p.MTU)
	})
	return out
}

// askEach sends an echo of length bytes to each address of which no fault is known. fault is
// that of one that does not answer.
func askEach(list []Probe, length func(*Probe) int, fault func(*Probe) string) {
	var families sync.WaitGroup
	for _, v4 := range []bool{true, false} {
		var asked []*Probe
		for i := range list {
			if p := &list[i]; p.Address.Is4() == v4 && p.Fault == "" {
				asked = append(asked, p)
			}
		}
		if len(asked) == 0 {
			continue
		}
		s, err := echoSocket(v4) // here: the calling thread is in the node's namespace
		families.Go(func() {
			var answered []bool
			if err == nil {
				answered, err = echoes(s, asked, length)
			}
			for i, p := range asked {
				switch {
				case err != nil:
					p.Fault = "cannot be asked: " + err.Error()
				case !answered[i]:
					p.Fault = fault(p)
				}
			}
		})
	}
	families.Wait()
}

// echoSocket is one of a family whose packets nobody may cut.
func echoSocket(v4 bool) (net.PacketConn, error) {
	network, level, option, value := "ip4:icmp", unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE
	if !v4 {
		network, level, option, value = "ip6:ipv6-icmp", unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		outer := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), level, option, value)
			// Room for what waits for the link addresses of many; without the right to have it, there is less.
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, probeRoom)
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, probeRoom)
		})
		return errors.Join(outer, err)
	}}
	return config.ListenPacket(context.Background(), network, "")
}

// echoes says which of the addresses, which are of the socket's family, answer. It closes the socket.
func echoes(s net.PacketConn, asked []*Probe, length func(*Probe) int) (answered []bool, err error) {
	defer s.Close()
	header, request, reply := 20, byte(8), byte(0)
	if asked[0].Address.Is6() {
		header, request, reply = 40, 128, 129
	}
	id := rand.Uint32() // in each echo, so that nobody else's answers are taken for its own
	answered = make([]bool, len(asked))
	var reading sync.WaitGroup
	reading.Go(func() {
		buf := make([]byte, 65536)
		for left := len(asked); left > 0; {
			n, from, err := s.ReadFrom(buf)
			if err != nil {
				return
			}
			if n < echoHeader || buf[0] != reply {
				continue
			}
			i := int(binary.BigEndian.Uint32(buf[4:]) - id)
			a, ok := netip.AddrFromSlice(from.(*net.IPAddr).IP)
			if i >= 0 && i < len(asked) && ok && a.Unmap() == asked[i].Address && !answered[i] {
				answered[i] = true
				left--
			}
		}
	})
	if err := s.SetWriteDeadline(time.Now().Add(probeTimeout)); err != nil {
		return nil, err
	}
	for i, p := range asked {
		message := make([]byte, max(length(p)-header, echoHeader))
		message[0] = request
		binary.BigEndian.PutUint32(message[4:], id+uint32(i)) // identifier and sequence number
		if p.Address.Is4() {                                  // the kernel does it for IPv6
			binary.BigEndian.PutUint16(message[2:], checksum(message))
		}
		s.WriteTo(message, &net.IPAddr{IP: p.Address.AsSlice()}) // one that does not even leave is not answered
	}
	err = s.SetDeadline(time.Now().Add(probeTimeout))
	reading.Wait()
	return answered, err
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
