// SPDX-License-Identifier: Apache-2.0

package engine

// Addresses that sockets name to Services' programs and that are more than they say.

import (
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// second adds another backend to the first Service, by whose socket it answers.
func (w *udpWorld) second() (c *net.UDPConn) {
	w.Helper()
	own := w.server.LocalAddr().(*net.UDPAddr)
	err := netns.Do(filepath.Join(filepath.Dir(w.path), w.n.name+"-p3"), func() (err error) {
		c, err = net.ListenUDP("udp", &net.UDPAddr{IP: own.IP})
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { c.Close() })
	w.n.must(func(e *Engine) error {
		return e.UpsertServices([]state.Service{udp(w.fronts[0].String(), w.backend.String(), c.LocalAddr().String())})
	})
	return c
}

// A connected socket takes answers from its backend alone: when it names its Service once more,
// it goes there, too.
func TestAConnectedSocketThatNamesItsService(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		servers := []*net.UDPConn{w.server, w.second()}
		for range 8 {
			c := w.socket()
			w.connect(c, sockaddr(w.fronts[0]))
			w.send(c, w.fronts[0])
			from, server := w.whoWasAsked(servers)
			if _, err := server.WriteToUDPAddrPort([]byte("answer"), from); err != nil {
				w.Fatal(err)
			}
			if got := w.receive(c); got != w.fronts[0] {
				w.Errorf("the answer comes from %v, want %v", got, w.fronts[0])
			}
		}
	})
}

// What a socket asked of a Service does not speak for it once it connects to the backend itself.
func TestASocketThatConnectsToItsBackend(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		c := w.socket()
		w.answered(c, w.ask(c, w.fronts[0]))
		w.connect(c, sockaddr(w.backend))
		w.write(c)
		if got := w.answered(c, w.receive(w.server)); got != w.backend {
			w.Errorf("the answer comes from %v, want %v", got, w.backend)
		}
	})
}

// The unspecified address is the pod's own loopback, although node ports have it in the table.
func TestTheUnspecifiedAddressIsThePodsOwn(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		any, all := netip.IPv4Unspecified(), "127.0.0.1"
		if w.backend.Addr().Is6() {
			any, all = netip.IPv6Unspecified(), "::1"
		}
		w.n.run("ip -n %s link set lo up", filepath.Base(w.path))
		own := w.socket()
		port := netip.AddrPortFrom(any, own.LocalAddr().(*net.UDPAddr).AddrPort().Port())
		nodePort := udp(port.String(), w.backend.String())
		nodePort.Ports[0].Frontends[0].Kind = state.NodePort
		w.n.must(func(e *Engine) error { return e.AddServices(nodePort) })
		for name, say := range map[string]func(c *net.UDPConn){
			"connected": func(c *net.UDPConn) { w.connect(c, sockaddr(port)); w.send(c, port) },
			"named":     func(c *net.UDPConn) { w.send(c, port) },
		} {
			say(w.socket())
			if from := w.receive(own); from.Addr() != netip.MustParseAddr(all) {
				w.Errorf("%s: a datagram from %v", name, from)
			}
		}
	})
}

// A Service at a pod's own address has its port alone: the others are the pod's.
func TestAServiceAtAPodsAddressLeavesItItsPorts(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		front := netip.AddrPortFrom(w.backend.Addr(), w.backend.Port()^1)
		w.n.must(func(e *Engine) error { return e.AddServices(udp(front.String(), w.backend.String())) })
		for name, say := range map[string]func(c *net.UDPConn){
			"connected": func(c *net.UDPConn) { w.connect(c, sockaddr(w.backend)); w.write(c) },
			"named":     func(c *net.UDPConn) { w.send(c, w.backend) },
		} {
			c := w.socket()
			say(c)
			if got := w.answered(c, w.receive(w.server)); got != w.backend {
				w.Errorf("%s: the answer comes from %v, want %v", name, got, w.backend)
			}
		}
	})
}

// send names the address, whether the socket is connected or not.
func (w *udpWorld) send(c *net.UDPConn, to netip.AddrPort) {
	w.Helper()
	if _, err := c.WriteToUDPAddrPort([]byte("question"), to); err != nil {
		w.Fatal(err)
	}
}

// write names no address.
func (w *udpWorld) write(c *net.UDPConn) {
	w.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		w.Fatal(err)
	}
	var failed error
	err = raw.Control(func(fd uintptr) { _, failed = unix.Write(int(fd), []byte("question")) })
	if err = errors.Join(err, failed); err != nil {
		w.Fatal(err)
	}
}

// whoWasAsked is the server that has a datagram, and where that came from.
func (w *udpWorld) whoWasAsked(servers []*net.UDPConn) (from netip.AddrPort, server *net.UDPConn) {
	w.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		for _, server := range servers {
			if err := server.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
				w.Fatal(err)
			}
			if _, from, err := server.ReadFromUDPAddrPort(make([]byte, 16)); err == nil {
				return netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), server
			}
		}
	}
	w.Fatal("nobody was asked")
	return from, nil
}
