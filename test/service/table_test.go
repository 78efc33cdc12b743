// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/mustang-net/mustang/lab"
)

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// ask dials, asks who, closes; port 0 takes any source port.
func (w *world) ask(from *lab.Pod, dst netip.AddrPort, port uint16) (name string, client netip.AddrPort) {
	w.t.Helper()
	c, err := dial(from, "tcp", dst, port)
	w.must(err)
	defer c.Close()
	name, client, err = who(c)
	w.must(err)
	return name, client
}

func (w *world) tcpByPodAddress() {
	name, client := w.ask(w.client, w.direct(0), 0)
	if name != w.servers[0].Name || client.Addr() != address(w.client, w.ipv6) {
		w.t.Errorf("answered by %s, which saw %s", name, client)
	}
}

func (w *world) tcpByService() {
	c, err := dial(w.client, "tcp", w.service(), 0)
	w.must(err)
	defer c.Close()
	_, client, err := who(c)
	w.must(err)
	if client.Addr() != address(w.client, w.ipv6) {
		w.t.Errorf("the server saw %s, not the client's address", client)
	}
	if peer := plain(c.RemoteAddr()); peer != w.service() {
		w.t.Errorf("the client's peer is %s, not the Service", peer)
	}
}

func (w *world) bulk() {
	const size = 8 << 20
	c, err := dial(w.client, "tcp", w.service(), 0)
	w.must(err)
	defer c.Close()
	data := make([]byte, size)
	rand.NewChaCha8([32]byte{1}).Read(data)
	go func() {
		c.Write(append([]byte("echo\n"), data...))
		c.(*net.TCPConn).CloseWrite()
	}()
	h := sha256.New()
	n, err := io.Copy(h, c)
	w.must(err)
	if want := sha256.Sum256(data); n != size || !bytes.Equal(h.Sum(nil), want[:]) {
		w.t.Errorf("%d bytes came back, not the %d that were sent", n, size)
	}
}

func (w *world) everyBackend() {
	seen := map[string]int{}
	for range 60 {
		name, _ := w.ask(w.client, w.service(), 0)
		seen[name]++
	}
	if len(seen) != len(w.servers) {
		w.t.Errorf("60 connections went to %v", seen)
	}
}

// datagram sends one and returns what comes back, and from where.
func datagram(u net.PacketConn, dst netip.AddrPort, data []byte) ([]byte, netip.AddrPort, error) {
	if _, err := u.WriteTo(data, net.UDPAddrFromAddrPort(dst)); err != nil {
		return nil, netip.AddrPort{}, err
	}
	u.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 65536)
	n, from, err := u.ReadFrom(buf)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	return buf[:n], plain(from), nil
}

func (w *world) listenUDP(p *lab.Pod) net.PacketConn {
	w.t.Helper()
	var u net.PacketConn
	w.must(p.Do(func() (err error) {
		u, err = net.ListenPacket("udp", netip.AddrPortFrom(address(p, w.ipv6), 0).String())
		return err
	}))
	w.t.Cleanup(func() { u.Close() })
	return u
}

func (w *world) udpByService() {
	c, err := dial(w.client, "udp", w.service(), 0)
	w.must(err)
	defer c.Close()
	first := ""
	for i := range 20 { // one flow, one backend
		fmt.Fprint(c, "who")
		buf := make([]byte, 1500)
		n, err := c.Read(buf)
		w.must(err)
		name, client, err := parseWho(string(buf[:n]))
		w.must(err)
		if i == 0 {
			first = name
		}
		if name != first || client.Addr() != address(w.client, w.ipv6) {
			w.t.Fatalf("datagram %d: %s saw %s; the flow began at %s", i, name, client, first)
		}
	}
	u := w.listenUDP(w.client)
	for i := range 20 {
		_, from, err := datagram(u, w.service(), []byte("who"))
		w.must(err)
		if from != w.service() {
			w.t.Fatalf("datagram %d came back from %s, not from the Service", i, from)
		}
	}
}

func (w *world) udpFragments() {
	u := w.listenUDP(w.client)
	for _, size := range []int{1473, 4000, 60000} {
		data := make([]byte, size)
		rand.NewChaCha8([32]byte{2}).Read(data)
		back, from, err := datagram(u, w.service(), data)
		if err != nil {
			w.t.Fatalf("%d bytes: %v", size, err)
		}
		if from != w.service() || !bytes.Equal(back, data) {
			w.t.Errorf("%d bytes: %d came back from %s", size, len(back), from)
		}
	}
}

func (w *world) udpTwoServices() {
	u := w.listenUDP(w.client)
	for i := range 10 {
		for _, dst := range []netip.AddrPort{w.service(), w.twin(), w.direct(0)} {
			_, from, err := datagram(u, dst, []byte("who"))
			w.must(err)
			if from != dst {
				w.t.Fatalf("round %d: sent to %s, answered from %s", i, dst, from)
			}
		}
	}
}

func (w *world) hairpin() {
	name, _ := w.ask(w.servers[0], w.twin(), 0)
	if name != w.servers[0].Name {
		w.t.Errorf("answered by %s", name)
	}
	u := w.listenUDP(w.servers[0])
	back, from, err := datagram(u, w.twin(), []byte("who"))
	w.must(err)
	if from != w.twin() {
		w.t.Errorf("%q came back from %s", back, from)
	}
}

func (w *world) echo() {
	for _, size := range []string{"56", "3000"} {
		cmd := w.client.Command(context.Background(), "ping", "-c", "3", "-i", "0.01", "-W", fmt.Sprint(30*slowness), "-s", size,
			address(w.servers[1], w.ipv6).String())
		if out, err := cmd.CombinedOutput(); err != nil {
			w.t.Errorf("ping with %s bytes: %v: %s", size, err, out)
		}
	}
}

// refused says whether a connection attempt was answered with a refusal, not with silence.
func refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

func (w *world) closedPort() {
	w.refusal(netip.AddrPortFrom(address(w.servers[0], w.ipv6), 9))
}

// unknownPort is a Service's address at a port that it does not have.
// unknownPort: a UDP socket that connects sends nothing, and many do so only to learn
// which address of their own leads there.
func (w *world) unknownPort() {
	dst := netip.AddrPortFrom(vip(w.ipv6), 9)
	if w.path != lab.MustangSocket {
		c, err := dial(w.client, "udp", dst, 0)
		w.must(err)
		c.Close()
	}
	w.refusal(dst)
}

// noBackends is a Service whose pods are not there yet, or no more.
func (w *world) noBackends() {
	dst := netip.AddrPortFrom(vip(w.ipv6), 8124)
	_, err := w.lab.Mustang(context.Background(), "svc", "add", "--service", dst.String())
	w.must(err)
	w.refusal(dst)
}

func (w *world) refusal(dst netip.AddrPort) {
	w.t.Helper()
	if _, err := dial(w.client, "tcp", dst, 0); !refused(err) {
		w.t.Errorf("tcp to a closed port: %v", err)
	}
	c, err := dial(w.client, "udp", dst, 0)
	if refused(err) {
		return // already at the socket
	}
	w.must(err)
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	c.Write([]byte("x"))
	if _, err := c.Read(make([]byte, 10)); !refused(err) {
		w.t.Errorf("udp to a closed port: %v", err)
	}
}

func (w *world) node() {
	node := w.lab.Node()
	var c net.Conn
	w.must(node.Do(func() (err error) {
		c, err = net.DialTimeout("tcp", w.direct(0).String(), patience)
		return err
	}))
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	name, _, err := who(c)
	w.must(err)
	if name != w.servers[0].Name {
		w.t.Errorf("answered by %s", name)
	}
	addr := node.IPv4
	if w.ipv6 {
		addr = node.IPv6
	}
	var l net.Listener
	w.must(node.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	}))
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			io.WriteString(c, "node\n")
			c.Close()
		}
	}()
	back, err := dial(w.client, "tcp", plain(l.Addr()), 0)
	w.must(err)
	defer back.Close()
	if line, err := bufio.NewReader(back).ReadString('\n'); line != "node\n" {
		w.t.Errorf("pod to node: %q, %v", line, err)
	}
}

// portReuse is the stall that stale flow state makes: one source port, the same
// backend by Service and by its own address, each time after the server closed.
func (w *world) portReuse() {
	const port = 20001
	for i := range 30 {
		dst := w.direct(0)
		if i%2 == 0 {
			dst = w.twin()
		}
		start, before, unsaid := time.Now(), w.sentAgain(), w.counted(w.servers[0], "netstat", "TCPACKSkippedTimeWait")
		c, err := dial(w.client, "tcp", dst, port)
		if err != nil {
			w.t.Fatalf("connection %d, to %s: %v", i, dst, err)
		}
		connected := time.Since(start)
		io.WriteString(c, "bye\n")
		if _, err := c.Read(make([]byte, 1)); err != io.EOF {
			w.t.Fatalf("connection %d, to %s: %v", i, dst, err)
		}
		c.Close()
		// Until its FIN is acknowledged the client's old socket holds the port, and under
		// emulation that takes long enough for the next SYN to overtake it.
		eventually(w.t, "the client's socket is closed", func() bool { return !lastAck(w.client, port) })
		// A SYN that is lost is sent again after a second. A machine that is busy with something
		// else is slow, too, but then nothing is sent again.
		took, again := time.Since(start), w.sentAgain()
		if took < slow(900*time.Millisecond) {
			continue
		}
		what := fmt.Sprintf("connection %d, to %s, took %s, %s of it until it was there; segments sent again by client and server: %d, before: %d",
			i, dst, took, connected, again, before)
		// The clocks that a client shows to two addresses differ, so the server's old socket may refuse a SYN to the
		// other one. It says so, and the client tries again at once; but if it has said something within half a second,
		// as to a FIN that came twice, the kernel has it say nothing, and two SYNs are lost.
		if w.counted(w.servers[0], "netstat", "TCPACKSkippedTimeWait") != unsaid {
			w.t.Log(what, "(the server's kernel left its refusal unsaid)")
			continue
		}
		if again != before {
			w.t.Fatalf("%s\n%s", what, w.scene())
		}
		w.t.Log(what)
	}
}

// sentAgain is how many TCP segments the client and the first server have sent
// again so far.
func (w *world) sentAgain() [2]int {
	const file, name = "snmp", "RetransSegs"
	return [2]int{w.counted(w.client, file, name), w.counted(w.servers[0], file, name)}
}

// counted is what TCP in a pod has counted so far, by the file below /proc/net that says it.
func (w *world) counted(p *lab.Pod, file, name string) (n int) {
	w.must(p.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/" + file)
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if f[0] != "Tcp:" && f[0] != "TcpExt:" {
				continue
			}
			if names == nil {
				names = f
				continue
			}
			n, err = strconv.Atoi(f[slices.Index(names, name)])
		}
		return err
	}))
	return n
}

// scene is what both ends and the node know, for somebody who looks for a packet.
func (w *world) scene() string {
	var b strings.Builder
	show := func(s *lab.Space, args ...string) {
		out, err := s.Command(context.Background(), args...).CombinedOutput()
		fmt.Fprintf(&b, "%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	for _, p := range []*lab.Pod{w.client, w.servers[0]} {
		show(&p.Space, "ss", "-tanoi")
		show(&p.Space, "ip", "neigh")
		show(&p.Space, "cat", "/proc/net/netstat")
	}
	show(&w.lab.Node().Space, w.lab.MustangArgs("status")...)
	return b.String()
}

// lastAck says whether a socket on the port waits for the acknowledgement of its FIN.
func lastAck(p *lab.Pod, port uint16) (waits bool) {
	const state = "09" // TCP_LAST_ACK
	p.Do(func() error {
		for _, file := range []string{"tcp", "tcp6"} {
			text, err := os.ReadFile("/proc/thread-self/net/" + file)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				f := strings.Fields(line)
				waits = waits || len(f) > 3 && f[3] == state && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port))
			}
		}
		return nil
	})
	return waits
}

// portCollision holds connections by Service and by pod address on one source
// port at the same time: to the backend they would be one flow.
func (w *world) portCollision() {
	for i, order := range [][]netip.AddrPort{{w.twin(), w.direct(0)}, {w.direct(0), w.twin()}} {
		port := uint16(20010 + i)
		var conns []net.Conn
		for _, dst := range order {
			c, err := dial(w.client, "tcp", dst, port)
			if w.path != lab.MustangTC && err != nil {
				continue // the socket itself refuses a second connection to the backend
			}
			w.must(err)
			defer c.Close()
			conns = append(conns, c)
		}
		for range 3 {
			for _, c := range conns {
				name, _, err := who(c)
				w.must(err)
				if name != w.servers[0].Name {
					w.t.Errorf("%s answered", name)
				}
			}
		}
	}
}

func (w *world) removal() {
	const port = 8123
	ctx := context.Background()
	dst := netip.AddrPortFrom(vip(w.ipv6), port)
	w.must(w.lab.Node().AddServices(ctx, []lab.Service{{
		VIP: dst.Addr(), Port: port, Protocol: "tcp", Backends: []netip.AddrPort{w.direct(0)},
	}}))
	c, err := dial(w.client, "tcp", dst, 0)
	w.must(err)
	defer c.Close()
	_, err = w.lab.Mustang(ctx, "svc", "rm", "--service", dst.String(), "--protocol", "tcp")
	w.must(err)
	if c, err := dial(w.client, "tcp", dst, 0); err == nil {
		c.Close()
		w.t.Error("a removed Service still takes connections")
	}
	if _, _, err := who(c); err != nil {
		w.t.Errorf("the connection from before: %v", err)
	}
	w.ask(w.client, w.service(), 0)
}
