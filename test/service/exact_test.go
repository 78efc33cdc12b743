// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/mustang-net/mustang/lab"
)

// TestRemoval: a backend goes, and exactly what went through that Service to it
// moves or ends.
func TestRemoval(t *testing.T) {
	for _, mode := range chosen(modesVariable, lab.Veth, lab.Bridge, lab.Macvlan, lab.HostDevice) {
		for _, path := range chosen(pathsVariable, lab.MustangTC, lab.MustangSocket, lab.Mustang) {
			t.Run(string(mode)+"/"+string(path), func(t *testing.T) {
				w := newWorld(t, mode, path)
				for i, family := range []string{"ipv4", "ipv6"} {
					t.Run(family, func(t *testing.T) { w.on(t, family).removals(uint16(9000 + 100*i)) })
				}
				t.Run("a removed pod", func(t *testing.T) {
					for _, family := range []string{"ipv4", "ipv6"} {
						t.Run(family, func(t *testing.T) { w.on(t, family).podRemoved() })
					}
				})
			})
		}
	}
}

func (w *world) removals(port uint16) {
	for i, c := range []struct {
		name string
		run  func(*world, *trial)
	}{
		{"udp, a backend is replaced", (*world).udpReplaced},
		{"udp, unconnected, a backend is replaced", (*world).udpUnconnectedReplaced},
		{"udp, the Service is removed", (*world).udpRemoved},
		{"udp, a socket that was reconnected to the pod stays", (*world).udpReconnected},
		{"tcp goes on while its backend only leaves", (*world).tcpLeaves},
		{"tcp is reset when its backend is gone", (*world).tcpGone},
		{"tcp by a removed Service is reset when asked", (*world).tcpServiceGone},
	} {
		w.t.Run(c.name, func(t *testing.T) {
			sub := *w
			sub.t = t
			tr := &trial{&sub, netip.AddrPortFrom(vip(w.ipv6), port+uint16(2*i)), netip.AddrPortFrom(vip(w.ipv6), port+uint16(2*i)+1)}
			tr.apply("", tr.a, 0)
			tr.apply("", tr.b, 0)
			c.run(&sub, tr)
		})
	}
}

// trial has two Services that share a backend: what happens to one must not
// touch the other.
type trial struct {
	*world
	a, b netip.AddrPort
}

// apply gives the Service these servers as its backends, by a new tool.
func (tr *trial) apply(flags string, service netip.AddrPort, servers ...int) time.Time {
	tr.t.Helper()
	var list []string
	for _, p := range []string{"tcp", "udp"} {
		var back []string
		for _, i := range servers {
			back = append(back, tr.direct(i).String())
		}
		list = append(list, fmt.Sprintf("{service: '%s', protocol: %s, backends: ['%s']}", service, p, strings.Join(back, "','")))
	}
	file := tr.t.TempDir() + "/services.yaml"
	tr.must(os.WriteFile(file, []byte("["+strings.Join(list, ",")+"]"), 0o600))
	tr.tool(append([]string{"svc", "apply", "-f", file}, strings.Fields(flags)...)...)
	return time.Now()
}

func (tr *trial) tool(args ...string) {
	tr.t.Helper()
	out, err := tr.lab.Node().Command(context.Background(), tr.lab.MustangArgs(args...)...).CombinedOutput()
	if err != nil || len(out) > 0 { // a notice is a failure, too
		tr.t.Fatalf("%s: %v: %s", args, err, out)
	}
}

// open connects and has an answer.
func (w *world) open(network string, dst netip.AddrPort) net.Conn {
	w.t.Helper()
	c, err := dial(w.client, network, dst, 0)
	w.must(err)
	w.t.Cleanup(func() { c.Close() })
	w.answers(c, w.servers[0].Name)
	return c
}

func (w *world) answers(c net.Conn, want string) {
	w.t.Helper()
	name, err := whoBy(c)
	if err != nil || name != want {
		w.t.Fatalf("%s %s>%s: answered by %q: %v; want %s", c.LocalAddr().Network(), c.LocalAddr(), c.RemoteAddr(), name, err, want)
	}
}

// whoBy is who for both protocols.
func whoBy(c net.Conn) (string, error) {
	c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "who\n"); err != nil {
		return "", err
	}
	buf := make([]byte, 1500)
	n, err := c.Read(buf)
	if err != nil {
		return "", err
	}
	name, _, err := parseWho(string(buf[:n]))
	return name, err
}

func ended(err error) bool {
	return slices.ContainsFunc([]error{syscall.ECONNABORTED, syscall.ECONNRESET, syscall.EDESTADDRREQ, syscall.ECONNREFUSED, syscall.EPIPE, io.EOF},
		func(e error) bool { return errors.Is(err, e) })
}

// waitsForEnd is a read that blocks until the socket ends; the result is when and how.
func waitsForEnd(c net.Conn) <-chan error {
	c.SetDeadline(time.Now().Add(patience))
	out := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		out <- err
	}()
	return out
}

// neighbours are connections that must not notice anything.
func (tr *trial) neighbours(network string) (check func()) {
	direct, other := tr.open(network, tr.direct(0)), tr.open(network, tr.b)
	return func() {
		tr.t.Helper()
		tr.answers(direct, tr.servers[0].Name)
		tr.answers(other, tr.servers[0].Name)
	}
}

// ownPath says that connect() gave the socket its backend.
func (w *world) ownPath() bool { return w.path != lab.MustangTC }

func (w *world) udpReplaced(tr *trial) {
	check := tr.neighbours("udp")
	c := tr.open("udp", tr.a)
	stop := make(chan struct{})
	inForce := tr.newFlowsMove(stop)
	moved := make(chan time.Time, 1)
	var last atomic.Value // what the flow met last
	go func() {
		for {
			name, err := whoBy(c)
			last.Store(fmt.Sprintf("%q, %v, at %s", name, err, time.Now().Format(time.TimeOnly)))
			if name == w.servers[1].Name || ended(err) {
				moved <- time.Now()
				return
			}
		}
	}()
	applied := tr.apply("", tr.a, 1)
	select {
	case at := <-moved:
		first := <-inForce
		w.t.Logf("the flow moved or ended %v after the first new flow had met the new backend", at.Sub(first))
	case <-time.After(2 * patience):
		w.t.Fatalf("the flow %s>%s has not moved since %s; last answer and error: %s", c.LocalAddr(), c.RemoteAddr(), applied.Format(time.TimeOnly), last.Load())
	}
	close(stop)
	if w.ownPath() { // the application connects anew
		if _, err := whoBy(c); err == nil {
			w.t.Error("the connected socket still works")
		}
		var err error
		c, err = dial(w.client, "udp", tr.a, 0)
		w.must(err)
		defer c.Close()
	}
	w.answers(c, w.servers[1].Name)
	check()
}

// newFlowsMove tells when the first new flow is answered by the new backend.
func (tr *trial) newFlowsMove(stop <-chan struct{}) <-chan time.Time {
	out := make(chan time.Time, 1)
	go func() {
		defer close(out)
		for {
			select {
			case <-stop:
				return
			default:
			}
			c, err := dial(tr.client, "udp", tr.a, 0)
			if err != nil {
				continue
			}
			name, _ := whoBy(c)
			c.Close()
			if name == tr.servers[1].Name {
				out <- time.Now()
				return
			}
		}
	}()
	return out
}

func (w *world) udpUnconnectedReplaced(tr *trial) {
	u := w.listenUDP(w.client)
	asks := func(dst netip.AddrPort) string {
		back, from, err := datagram(u, dst, []byte("who"))
		w.must(err)
		name, _, err := parseWho(string(back))
		w.must(err)
		if from != dst && dst != tr.b {
			w.t.Fatalf("sent to %s, answered from %s", dst, from)
		}
		return name
	}
	check := tr.neighbours("udp")
	asks(tr.a)
	asks(tr.b)
	tr.apply("", tr.a, 1)
	if name := asks(tr.a); name != w.servers[1].Name {
		w.t.Errorf("%s still answers", name)
	}
	if name := asks(tr.b); name != w.servers[0].Name {
		w.t.Errorf("the other Service is answered by %s", name)
	}
	check()
}

func (w *world) udpRemoved(tr *trial) {
	check := tr.neighbours("udp")
	c := tr.open("udp", tr.a)
	tr.tool("svc", "rm", "--service", tr.a.String(), "--protocol", "udp")
	if name, err := whoBy(c); err == nil {
		w.t.Errorf("%s still answers", name)
	} else if w.ownPath() && !ended(err) {
		w.t.Errorf("the connected socket was told %v", err)
	}
	check()
}

// udpReconnected is a socket that was the Service's once, and is the pod's own now.
func (w *world) udpReconnected(tr *trial) {
	c := tr.open("udp", tr.a).(*net.UDPConn)
	raw, err := c.SyscallConn()
	w.must(err)
	var connectErr error
	w.must(raw.Control(func(fd uintptr) { connectErr = syscall.Connect(int(fd), sockaddr(w.direct(0))) }))
	w.must(connectErr)
	w.answers(c, w.servers[0].Name)
	tr.apply("", tr.a, 1)
	w.answers(c, w.servers[0].Name)
}

func sockaddr(a netip.AddrPort) syscall.Sockaddr {
	if a.Addr().Is4() {
		return &syscall.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &syscall.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func (w *world) tcpLeaves(tr *trial) {
	check := tr.neighbours("tcp")
	c := tr.open("tcp", tr.a)
	tr.apply("", tr.a, 1)
	w.answers(c, w.servers[0].Name)
	if name, _ := w.ask(w.client, tr.a, 0); name != w.servers[1].Name {
		w.t.Errorf("a new connection is answered by %s", name)
	}
	check()
}

func (w *world) tcpGone(tr *trial) {
	check := tr.neighbours("tcp")
	c := tr.open("tcp", tr.a)
	if !w.served(0, c) {
		w.t.Fatal("the backend does not have the connection")
	}
	end := waitsForEnd(c)
	start := time.Now()
	tr.apply("--reset", tr.a, 1)
	if err := <-end; !ended(err) {
		w.t.Fatalf("the connection was told %v", err)
	}
	w.t.Logf("reset %v after the command began", time.Since(start))
	eventually(w.t, "the backend has been reset, too", func() bool { return !w.served(0, c) })
	check()
}

// served says whether server i has an established connection from c's port.
func (w *world) served(i int, c net.Conn) bool {
	w.t.Helper()
	out, err := w.servers[i].Command(context.Background(), "ss", "-Htn", "state", "established").Output()
	w.must(err)
	port := fmt.Sprintf(":%d", plain(c.LocalAddr()).Port())
	return slices.ContainsFunc(strings.Fields(string(out)), func(s string) bool { return strings.HasSuffix(s, port) })
}

func (w *world) tcpServiceGone(tr *trial) {
	check := tr.neighbours("tcp")
	end := waitsForEnd(tr.open("tcp", tr.a))
	tr.tool("svc", "rm", "--reset", "--service", tr.a.String(), "--protocol", "tcp")
	if err := <-end; !ended(err) {
		w.t.Fatalf("the connection was told %v", err)
	}
	check()
}

// podRemoved takes away a pod that a Service still names: its connections
// through the Service end, those of others do not.
func (w *world) podRemoved() {
	ctx := context.Background()
	p := w.pod(ctx, map[bool]string{false: "leaver4", true: "leaver6"}[w.ipv6])
	sub := *w
	sub.servers = []*lab.Pod{p, w.servers[1]}
	sub.startServer(p)
	tr := &trial{world: &sub, a: netip.AddrPortFrom(vip(w.ipv6), 9900), b: netip.AddrPortFrom(vip(w.ipv6), 9901)}
	tr.apply("", tr.a, 0)
	tr.apply("", tr.b, 1)
	end := waitsForEnd(sub.open("tcp", tr.a))
	other, err := dial(w.client, "tcp", tr.b, 0)
	w.must(err)
	defer other.Close()
	w.answers(other, w.servers[1].Name)
	start := time.Now()
	w.must(w.lab.Node().RemovePod(ctx, p))
	if err := <-end; !ended(err) {
		w.t.Errorf("the connection was told %v", err)
	}
	w.t.Logf("reset %v after the removal began", time.Since(start))
	w.answers(other, w.servers[1].Name)
}
