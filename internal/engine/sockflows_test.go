// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// udpWorld is a pod whose UDP sockets use Services, another one that answers, and
// what the programs keep of such sockets.
type udpWorld struct {
	*testing.T
	n          *node
	path       string // the clients' namespace
	server     *net.UDPConn
	serverPath string
	backend    netip.AddrPort
	fronts     []netip.AddrPort // two Services of that backend, and one of another
	other      *net.UDPConn     // that one
	flows      *ebpf.Map
	slots      *ebpf.Map
}

// bothUDP runs fn for each family.
func bothUDP(t *testing.T, by state.ServicePath, fn func(w *udpWorld)) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) { fn(newUDPWorld(t, by, v6)) })
	}
}

func newUDPWorld(t *testing.T, by state.ServicePath, v6 bool) *udpWorld {
	n := newNode(t)
	paths := []string{n.pod(2), n.pod(3)}
	for i, path := range paths {
		pod := filepath.Base(path)
		n.run("ip -n %s -6 route add default via fe80::1 dev eth0 onlink", pod)
		n.run("ip -n %s neigh add fe80::1 dev eth0 lladdr $(ip -br link show h%d | awk '{print $3}')", pod, i+2)
		n.must(func(e *Engine) error {
			_, err := e.AddEndpoint(context.Background(), EndpointSpec{Netns: path, IfName: "eth0", Owner: state.OwnerCLI, ServicePath: by})
			return err
		})
	}
	w := &udpWorld{T: t, n: n, path: paths[0], serverPath: paths[1]}
	own, fronts := "10.9.0.3", []string{"10.96.0.1:80", "10.96.0.2:80", "10.96.0.3:80"}
	if v6 {
		own, fronts = "fd09::3", []string{"[fd50::1]:80", "[fd50::2]:80", "[fd50::3]:80"}
	}
	err := netns.Do(paths[1], func() (err error) {
		w.server, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(own)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.server.Close() })
	w.backend = w.server.LocalAddr().(*net.UDPAddr).AddrPort()
	w.other = w.another()
	w.flows, w.slots = n.table(bpfgen.SockMapMstSockFlowsV1), n.table(bpfgen.SockMapMstUdpSlotsV1)
	n.must(func(e *Engine) error {
		return e.AddServices(udp(fronts[0], w.backend.String()), udp(fronts[1], w.backend.String()),
			udp(fronts[2], w.other.LocalAddr().String()))
	})
	for _, front := range fronts {
		w.fronts = append(w.fronts, netip.MustParseAddrPort(front))
	}
	inCgroup(t)
	return w
}

// socket is an unconnected socket of the clients' pod.
func (w *udpWorld) socket() (c *net.UDPConn) {
	w.Helper()
	network := "udp4"
	if w.backend.Addr().Is6() {
		network = "udp6"
	}
	err := netns.Do(w.path, func() (err error) {
		c, err = net.ListenUDP(network, nil)
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { c.Close() })
	return c
}

// ask sends to a Service. It returns where the question came from, as the server sees it.
func (w *udpWorld) ask(c *net.UDPConn, front netip.AddrPort) netip.AddrPort {
	w.Helper()
	if _, err := c.WriteToUDPAddrPort([]byte("question"), front); err != nil {
		w.Fatal(err)
	}
	return w.receive(w.server)
}

// answered says whom the client takes an answer from.
func (w *udpWorld) answered(c *net.UDPConn, to netip.AddrPort) netip.AddrPort {
	w.Helper()
	if _, err := w.server.WriteToUDPAddrPort([]byte("answer"), to); err != nil {
		w.Fatal(err)
	}
	return w.receive(c)
}

func (w *udpWorld) receive(c *net.UDPConn) netip.AddrPort {
	w.Helper()
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		w.Fatal(err)
	}
	_, from, err := c.ReadFromUDPAddrPort(make([]byte, 16))
	if err != nil {
		w.Fatal(err)
	}
	return netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
}

// slotOrStored runs fn where sockets have slots, and where what they are told is stored with them.
func (w *udpWorld) slotOrStored(fn func(stored bool)) {
	w.Helper()
	fn(false)
	fillSlots(w.T, w.slots)
	fn(true)
}

// kept is what the programs keep of sockets: entries of the table by bpfgen.SockFlowThere and so on, and slots.
type kept struct{ There, Back, Connected, Slots int }

func (w *udpWorld) keep(what string, want kept) {
	w.Helper()
	var k bpfgen.SockSockFlowKey
	var v bpfgen.SockSockFlow
	var count [3]int
	it := w.flows.Iterate()
	for it.Next(&k, &v) {
		count[k.Kind]++
	}
	got := kept{There: count[bpfgen.SockFlowThere], Back: count[bpfgen.SockFlowBack], Connected: count[bpfgen.SockFlowConnected]}
	var i uint32
	var slot bpfgen.SockSockSlot
	slots := w.slots.Iterate()
	for slots.Next(&i, &slot) {
		if slot.Cookie != 0 && slot.Cookie < 1<<62 {
			got.Slots++
		}
	}
	if err := errors.Join(it.Err(), slots.Err()); err != nil {
		w.Fatal(err)
	}
	if got != want {
		w.Errorf("%s: %+v are kept, want %+v", what, got, want)
	}
}

// later is a socket that has asked another Service before: what it asks now is kept in the table.
func (w *udpWorld) later() *net.UDPConn {
	w.Helper()
	c := w.socket()
	if _, err := c.WriteToUDPAddrPort([]byte("question"), w.fronts[2]); err != nil {
		w.Fatal(err)
	}
	w.receive(w.other)
	return c
}

// loseWayBack does what the table does when it needs the entry's room.
func (w *udpWorld) loseWayBack(c *net.UDPConn) {
	w.Helper()
	key := bpfgen.SockSockFlowKey{Cookie: cookieOf(w.T, c), Port: datapath.Port(w.backend.Port()), Kind: bpfgen.SockFlowBack}
	key.Addr.Bytes = w.backend.Addr().As16()
	if err := w.flows.Delete(key); err != nil {
		w.Fatal(err)
	}
}

func TestAnUnconnectedSocketFindsItsWayBackAgain(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		c, front := w.later(), w.fronts[0]
		w.ask(c, front)
		w.loseWayBack(c)
		if got := w.answered(c, w.ask(c, front)); got != front {
			w.Errorf("the answer comes from %v, want %v", got, front)
		}
		w.keep("an open socket", kept{There: 1, Back: 1, Slots: 1})
	})
}

// fillFlows has others use up the table of what unconnected sockets asked, and calls fn now and then.
func (w *udpWorld) fillFlows(fn func()) {
	w.Helper()
	const chunk = 512
	keys, values := make([]bpfgen.SockSockFlowKey, chunk), make([]bpfgen.SockSockFlow, chunk)
	for at := range 3 * int(w.flows.MaxEntries()) / chunk {
		for i := range keys {
			keys[i].Cookie = 1<<62 + uint64(at*chunk+i)
		}
		if _, err := w.flows.BatchUpdate(keys, values, nil); err != nil {
			w.Fatal(err)
		}
		fn()
	}
}

// Who sends keeps both entries, while its server is slow and others use up the table.
func TestAnUnconnectedSocketKeepsItsWayBackInAFullTable(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		c, front := w.later(), w.fronts[0]
		from := w.ask(c, front)
		w.fillFlows(func() { from = w.ask(c, front) })
		if got := w.answered(c, from); got != front {
			w.Errorf("the answer comes from %v, want %v", got, front)
		}
	})
}

// What it asked first no other socket can turn out, however long it is silent.
func TestAnUnconnectedSocketsFirstServiceIsItsOwn(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		w.slotOrStored(func(stored bool) {
			c, front := w.socket(), w.fronts[0]
			from := w.ask(c, front)
			w.fillFlows(func() {})
			if got := w.answered(c, from); got != front {
				w.Errorf("stored %t: the answer comes from %v, want %v", stored, got, front)
			}
		})
	})
}

// A way back that is another Service's is left to that one: the second one's
// datagrams go by NAT, so that the answers can be told apart.
func TestTwoServicesOfOneBackendAreToldApart(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		told := func(what string, c *net.UDPConn, from [2]netip.AddrPort) {
			w.Helper()
			for i, front := range w.fronts[:2] {
				if got := w.answered(c, from[i]); got != front {
					w.Errorf("%s, Service %d: the answer comes from %v, want %v", what, i, got, front)
				}
			}
		}
		c := w.later()
		w.ask(c, w.fronts[0])
		w.loseWayBack(c)
		from := [2]netip.AddrPort{1: w.ask(c, w.fronts[1])}
		from[0] = w.ask(c, w.fronts[0])
		told("in the table", c, from)
		w.slotOrStored(func(stored bool) {
			c := w.socket()
			from := [2]netip.AddrPort{w.ask(c, w.fronts[0]), w.ask(c, w.fronts[1])}
			from[0] = w.ask(c, w.fronts[0])
			told("its first", c, from)
		})
	})
}

// Where there is no NAT, nothing else tells the answers of two Services apart.
func TestTheServiceThatWasAskedLastHasTheAnswers(t *testing.T) {
	bothUDP(t, state.PathSocket, func(w *udpWorld) {
		for _, c := range []*net.UDPConn{w.socket(), w.later()} {
			for _, i := range []int{0, 1, 0, 1} {
				if got := w.answered(c, w.ask(c, w.fronts[i])); got != w.fronts[i] {
					w.Errorf("Service %d: the answer comes from %v, want %v", i, got, w.fronts[i])
				}
			}
		}
	})
}

// A socket that goes to the backend itself takes its answers as such from then on.
func TestAnUnconnectedSocketGoesToABackendItself(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		w.slotOrStored(func(stored bool) {
			for _, c := range []*net.UDPConn{w.socket(), w.later()} {
				for _, to := range []netip.AddrPort{w.fronts[0], w.backend} {
					if got := w.answered(c, w.ask(c, to)); got != to {
						w.Errorf("stored %t: the answer comes from %v, want %v", stored, got, to)
					}
				}
			}
		})
	})
}

// What a socket asked of its first Service goes with it.
func TestAClosedUnconnectedSocketLeavesNothing(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		w.slotOrStored(func(stored bool) {
			for range 3 {
				c := w.socket()
				w.answered(c, w.ask(c, w.fronts[0]))
				w.keep("an open socket", kept{Slots: map[bool]int{false: 1}[stored]})
				if err := c.Close(); err != nil {
					w.Fatal(err)
				}
				w.keep("a closed socket", kept{})
			}
		})
	})
}

// Nor what it asked of a backend that its Service got meanwhile; the one before is another Service's still.
func TestASocketThatWasMovedLeavesNothing(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		w.slotOrStored(func(stored bool) {
			front := w.fronts[0]
			moved := func(to *net.UDPConn) {
				w.n.must(func(e *Engine) error {
					return e.UpsertServices([]state.Service{udp(front.String(), to.LocalAddr().String())})
				})
			}
			moved(w.server)
			c := w.socket()
			w.ask(c, front)
			moved(w.other)
			if _, err := c.WriteToUDPAddrPort([]byte("question"), front); err != nil {
				w.Fatal(err)
			}
			w.receive(w.other)
			if err := c.Close(); err != nil {
				w.Fatal(err)
			}
			w.keep("a closed socket", kept{})
		})
	})
}

// A Service that gets a backend more moves none of the sockets that have a slot.
func TestAnUnconnectedSocketStaysWithItsBackend(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		front := w.fronts[0]
		c := w.socket()
		w.ask(c, front)
		w.n.must(func(e *Engine) error {
			return e.UpsertServices([]state.Service{udp(front.String(), w.backend.String(), w.other.LocalAddr().String())})
		})
		for range 20 {
			w.ask(c, front)
		}
	})
}

// another is a second server in the server's pod.
func (w *udpWorld) another() (c *net.UDPConn) {
	w.Helper()
	err := netns.Do(w.serverPath, func() (err error) {
		c, err = net.ListenUDP("udp", &net.UDPAddr{IP: w.backend.Addr().AsSlice()})
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { c.Close() })
	return c
}
