// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// The kernel's socket diagnosis tells of each socket what connect() stored with it:
// so one that a Service led to a backend is told from one that went there by itself.
func TestSocketsHereAreThoseThatAServiceLed(t *testing.T) {
	d := nearWorld(t)
	specs, err := tableSpecs()
	if err != nil {
		t.Fatal(err)
	}
	peers, err := ebpf.NewMap(specs[bpfgen.SockMapMstSockPeersV1])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peers.Close() })
	d.maps[bpfgen.SockMapMstSockPeersV1] = peers
	flows, err := ebpf.NewMap(specs[bpfgen.SockMapMstSockFlowsV1])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { flows.Close() })
	d.maps[bpfgen.SockMapMstSockFlowsV1] = flows
	for _, name := range slotTables {
		slots, err := ebpf.NewMap(specs[name])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { slots.Close() })
		d.maps[name] = slots
	}
	for _, on := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", on)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		backend := l.Addr().(*net.TCPAddr).AddrPort()
		for network, p := range map[string]state.Protocol{"tcp": state.TCP, "udp": state.UDP} {
			c, err := net.Dial(network, backend.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			itself, err := net.Dial(network, backend.String())
			if err != nil {
				t.Fatal(err)
			}
			defer itself.Close()
			peer := sockPeer{FrontendPort: Port(nearFront.Port()), BackendPort: Port(backend.Port())}
			peer.Frontend.Bytes = FromAddr(nearFront.Addr()).Bytes
			peer.BackendAddr.Bytes = FromAddr(backend.Addr()).Bytes
			store(t, peers, flows, c, peer)
			var dep Departures
			dep.Gone(state.Backend{AddrPort: backend, Protocol: p})
			found, err := d.SocketsHere(&dep)
			if err != nil || len(found) != 1 {
				t.Fatalf("%s to %v: %d sockets, %v: want the one that the Service led", network, backend, len(found), err)
			}
			local := connectionOf(found[0].family, found[0].id[:]).Local
			if want := netip.MustParseAddrPort(c.LocalAddr().String()); local != want {
				t.Errorf("%s to %v: found %v, want %v", network, backend, local, want)
			}
			var other Departures
			other.Gone(state.Backend{AddrPort: netip.AddrPortFrom(backend.Addr(), 1), Protocol: p})
			if found, err = d.SocketsHere(&other); err != nil || len(found) != 0 {
				t.Errorf("%s: %d sockets to a backend that nobody uses, %v", network, len(found), err)
			}
		}
	}
}

// store does what connect() would.
func store(t *testing.T, peers, flows *ebpf.Map, c net.Conn, peer sockPeer) {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var put error
	err = raw.Control(func(fd uintptr) {
		put = peers.Put(int32(fd), peer)
		if _, udp := c.(*net.UDPConn); !udp || put != nil {
			return
		}
		key := sockFlowKey{Port: peer.BackendPort, Kind: bpfgen.SockFlowConnected}
		key.Addr.Bytes = peer.BackendAddr.Bytes
		if key.Cookie, put = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE); put != nil {
			return
		}
		flow := sockFlow{Port: peer.FrontendPort}
		flow.Addr.Bytes = peer.Frontend.Bytes
		put = flows.Put(key, flow)
	})
	if err != nil || put != nil {
		t.Fatal(err, put)
	}
}
