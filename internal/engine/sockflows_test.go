// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

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
	fronts     []netip.AddrPort // two Services of that backend
	flows      *ebpf.Map
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
	own, fronts := "10.9.0.3", []string{"10.96.0.1:80", "10.96.0.2:80"}
	if v6 {
		own, fronts = "fd09::3", []string{"[fd50::1]:80", "[fd50::2]:80"}
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
	n.must(func(e *Engine) (err error) {
		if w.flows, err = e.dp.Map(bpfgen.SockMapMstSockFlowsV1).Clone(); err != nil {
			return err
		}
		return e.AddServices(udp(fronts[0], w.backend.String()), udp(fronts[1], w.backend.String()))
	})
	t.Cleanup(func() { w.flows.Close() })
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

// kept counts what the programs keep of sockets, by bpfgen.SockFlowThere and so on.
func (w *udpWorld) kept() (out [3]int) {
	w.Helper()
	var k bpfgen.SockSockFlowKey
	var v bpfgen.SockSockFlow
	it := w.flows.Iterate()
	for it.Next(&k, &v) {
		out[k.Kind]++
	}
	if err := it.Err(); err != nil {
		w.Fatal(err)
	}
	return out
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
		c, front := w.socket(), w.fronts[0]
		w.ask(c, front)
		w.loseWayBack(c)
		if got := w.answered(c, w.ask(c, front)); got != front {
			w.Errorf("the answer comes from %v, want %v", got, front)
		}
		if got := w.kept(); got != [3]int{1, 1, 0} {
			w.Errorf("%v entries are kept", got)
		}
	})
}

// Who sends keeps both entries, while its server is slow and others use up the table.
func TestAnUnconnectedSocketKeepsItsWayBackInAFullTable(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		c, front := w.socket(), w.fronts[0]
		from := w.ask(c, front)
		const chunk = 512
		keys, values := make([]bpfgen.SockSockFlowKey, chunk), make([]bpfgen.SockSockFlow, chunk)
		for at := range 3 * int(w.flows.MaxEntries()) / chunk {
			for i := range keys {
				keys[i].Cookie = 1<<62 + uint64(at*chunk+i)
			}
			if _, err := w.flows.BatchUpdate(keys, values, nil); err != nil {
				w.Fatal(err)
			}
			from = w.ask(c, front)
		}
		if got := w.answered(c, from); got != front {
			w.Errorf("the answer comes from %v, want %v", got, front)
		}
	})
}

// A way back that was lost and is another Service's by now is left to that one: the
// first one's datagrams go by NAT, so that the answers can be told apart.
func TestTwoServicesOfOneBackendAreToldApart(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		c := w.socket()
		w.ask(c, w.fronts[0])
		w.loseWayBack(c)
		from := [2]netip.AddrPort{1: w.ask(c, w.fronts[1])}
		from[0] = w.ask(c, w.fronts[0])
		for i, front := range w.fronts {
			if got := w.answered(c, from[i]); got != front {
				w.Errorf("Service %d: the answer comes from %v, want %v", i, got, front)
			}
		}
	})
}

// Where there is no NAT, nothing else tells the answers of two Services apart.
func TestTheServiceThatWasAskedLastHasTheAnswers(t *testing.T) {
	bothUDP(t, state.PathSocket, func(w *udpWorld) {
		c := w.socket()
		for _, i := range []int{0, 1, 0, 1} {
			if got := w.answered(c, w.ask(c, w.fronts[i])); got != w.fronts[i] {
				w.Errorf("Service %d: the answer comes from %v, want %v", i, got, w.fronts[i])
			}
		}
	})
}

// What a socket asked of its first Service goes with it.
func TestAClosedUnconnectedSocketLeavesNothing(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		for range 3 {
			c := w.socket()
			w.answered(c, w.ask(c, w.fronts[0]))
			if got := w.kept(); got != [3]int{1, 1, 0} {
				t.Errorf("%v entries of an open socket", got)
			}
			if err := c.Close(); err != nil {
				w.Fatal(err)
			}
			if got := w.kept(); got != [3]int{} {
				t.Errorf("%v entries of a closed socket", got)
			}
		}
	})
}

// Nor what it asked of a backend that its Service got meanwhile.
func TestASocketThatWasMovedLeavesNothing(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		c, front := w.socket(), w.fronts[0]
		w.ask(c, front)
		later := w.another()
		w.n.must(func(e *Engine) error {
			return e.UpsertServices([]state.Service{udp(front.String(), later.LocalAddr().String())})
		})
		if _, err := c.WriteToUDPAddrPort([]byte("question"), front); err != nil {
			w.Fatal(err)
		}
		w.receive(later)
		if err := c.Close(); err != nil {
			w.Fatal(err)
		}
		if got := w.kept(); got != [3]int{} {
			t.Errorf("%v entries of a closed socket", got)
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

// To the kernel an IPv6 socket that is connected to IPv4 names its peer with each datagram: a backend's address is not the
// Service's of that address once more, whose answers it would not take.
func TestAConnectedIPv6SocketStaysWithItsBackend(t *testing.T) {
	w := newUDPWorld(t, state.PathBoth, false)
	w.n.must(func(e *Engine) error {
		return e.UpsertServices([]state.Service{udp(w.fronts[0].String(), w.fronts[1].String())}) // a Service of a Service
	})
	var c net.Conn
	err := netns.Do(w.path, func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), "udp")
		defer f.Close()
		to := &unix.SockaddrInet6{Port: int(w.fronts[0].Port()), Addr: w.fronts[0].Addr().As16()}
		if err := unix.Connect(fd, to); err != nil {
			return err
		}
		c, err = net.FileConn(f)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 2 {
		if _, err := c.Write([]byte("question")); err != nil {
			t.Fatal(err)
		}
		if got := w.answered(c.(*net.UDPConn), w.receive(w.server)); got != w.fronts[0] {
			t.Errorf("the answer comes from %v, want %v", got, w.fronts[0])
		}
	}
}

// A connected socket has one entry, of its last connect(), until it closes.
func TestAClosedSocketLeavesNothing(t *testing.T) {
	bothUDP(t, state.PathBoth, func(w *udpWorld) {
		for name, then := range map[string]func(c *net.UDPConn){
			"connected":    func(*net.UDPConn) {},
			"to another":   func(c *net.UDPConn) { w.connect(c, sockaddr(w.fronts[1])) },
			"disconnected": func(c *net.UDPConn) { w.connect(c, make([]byte, unix.SizeofSockaddrInet4)) }, // AF_UNSPEC
		} {
			c := w.socket()
			w.connect(c, sockaddr(w.fronts[0]))
			then(c)
			if got := w.kept(); got != [3]int{0, 0, 1} {
				w.Errorf("%s: %v entries of an open socket", name, got)
			}
			if err := c.Close(); err != nil {
				w.Fatal(err)
			}
			if got := w.kept(); got != [3]int{} {
				w.Errorf("%s: %v entries of a closed socket", name, got)
			}
		}
	})
}

// connect is connect(2), any number of times.
func (w *udpWorld) connect(c *net.UDPConn, to []byte) {
	w.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		w.Fatal(err)
	}
	var errno syscall.Errno
	err = raw.Control(func(fd uintptr) {
		_, _, errno = unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&to[0])), uintptr(len(to)))
	})
	if err != nil || errno != 0 {
		w.Fatal(err, errno)
	}
}

// sockaddr is a struct sockaddr_in or sockaddr_in6.
func sockaddr(a netip.AddrPort) []byte {
	b := make([]byte, unix.SizeofSockaddrInet4)
	family, at := uint16(unix.AF_INET), 4
	if a.Addr().Is6() {
		b = make([]byte, unix.SizeofSockaddrInet6)
		family, at = unix.AF_INET6, 8
	}
	binary.NativeEndian.PutUint16(b, family)
	binary.BigEndian.PutUint16(b[2:], a.Port())
	copy(b[at:], a.Addr().AsSlice())
	return b
}
