// SPDX-License-Identifier: Apache-2.0

// Package nodes_test is the table of tests between nodes: real sockets in the
// pods of two nodes that a wire joins, through the mustang binary as a user runs
// it, for every way of joining nodes, both ways of forwarding, both families.
//
// MUSTANG_TEST_MODES chooses how pods are connected (veth by default),
// MUSTANG_BIN names a binary instead of building one, MUSTANG_TEST_SLOWNESS
// lengthens deadlines for emulation.
package nodes_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/built"
)

const (
	serverPort = 8080
	vipPort    = 80
)

// slowness is how many times longer than a machine an emulated one takes.
var slowness = max(1, number("MUSTANG_TEST_SLOWNESS"))

func number(variable string) int {
	n, _ := strconv.Atoi(os.Getenv(variable))
	return n
}

// patience is that with what takes no time on a machine that has any.
var patience = slow(30 * time.Second)

func slow(d time.Duration) time.Duration { return d * time.Duration(slowness) }

var tool string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "mustang-nodes-test-")
	if err == nil {
		tool, err = built.Binary(dir, "mustang", "MUSTANG_BIN")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "nodes tests:", err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func TestWhatIsRunIsAnInput(t *testing.T) { built.Declare(t, "mustang") }

func modes() []lab.Mode {
	var out []lab.Mode
	for _, m := range strings.Split(os.Getenv("MUSTANG_TEST_MODES"), ",") {
		if m != "" {
			out = append(out, lab.Mode(m))
		}
	}
	if out == nil {
		return []lab.Mode{lab.Veth}
	}
	return out
}

var labs atomic.Int32

// world is two joined nodes: a client and a server on the first, a server on the
// second, and on both nodes a Service for each server.
type world struct {
	t                 *testing.T
	lab               *lab.Lab
	join              lab.Join
	client, near, far *lab.Pod
	ipv6              bool
	from              place // who asks; the client's pod where nothing else is said
}

// place is where a client is.
type place struct {
	name     string
	space    *lab.Space
	ip4, ip6 netip.Addr
}

func podPlace(p *lab.Pod) place { return place{p.Name, &p.Space, p.IPv4, p.IPv6} }

// outsidePlace is that of the machine outside of both nodes.
func (w *world) outsidePlace() place {
	o := w.lab.Outside()
	return place{"outside", &o.Space, o.IPv4, o.IPv6}
}

// by is w with another client.
func (w *world) by(p place) *world {
	sub := *w
	sub.from = p
	return &sub
}

// me is the client's address.
func (w *world) me() netip.Addr {
	if w.ipv6 {
		return w.from.ip6
	}
	return w.from.ip4
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), slow(5*time.Minute))
	t.Cleanup(cancel)
	return ctx
}

// newWorld makes the nodes, and joins them before there are pods.
func newWorld(t *testing.T, cfg lab.Config, join lab.Join) *world {
	t.Helper()
	ctx := deadline(t)
	cfg.Name, cfg.Binary, cfg.Nodes = fmt.Sprintf("w%d%c", os.Getpid()%1000, 'a'+labs.Add(1)%26), tool, max(2, cfg.Nodes)
	if cfg.Mode == "" {
		cfg.Mode = lab.Veth
	}
	if cfg.Services == "" {
		cfg.Services = lab.MustangTC
	}
	l, err := lab.New(ctx, cfg)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	w := &world{t: t, lab: l, join: join}
	w.must(l.Join(ctx, join))
	first, second := l.Nodes()[0], l.Nodes()[1]
	w.client, w.near, w.far = w.pod(first, "client"), w.pod(first, "near"), w.pod(second, "far")
	w.from = podPlace(w.client)
	for _, p := range []*lab.Pod{w.client, w.near, w.far} {
		w.serve(p)
	}
	for _, n := range l.Nodes() {
		w.must(n.AddServices(ctx, w.services()))
	}
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) on(t *testing.T, ipv6 bool) *world {
	sub := *w
	sub.t, sub.ipv6 = t, ipv6
	return &sub
}

func (w *world) pod(n *lab.Node, name string) *lab.Pod {
	w.t.Helper()
	p, err := n.AddPod(deadline(w.t), name)
	if errors.Is(err, errors.ErrUnsupported) {
		w.t.Skip(err)
	}
	w.must(err)
	return p
}

func (w *world) services() []lab.Service {
	var out []lab.Service
	for i, p := range []*lab.Pod{w.near, w.far} {
		for _, protocol := range []string{"tcp", "udp"} {
			out = append(out,
				lab.Service{VIP: lab.VIP4(i + 1), Port: vipPort, Protocol: protocol, Backends: []netip.AddrPort{netip.AddrPortFrom(p.IPv4, serverPort)}},
				lab.Service{VIP: lab.VIP6(i + 1), Port: vipPort, Protocol: protocol, Backends: []netip.AddrPort{netip.AddrPortFrom(p.IPv6, serverPort)}})
		}
	}
	return out
}

func (w *world) ip(p *lab.Pod) netip.Addr {
	if w.ipv6 {
		return p.IPv6
	}
	return p.IPv4
}

func (w *world) direct(p *lab.Pod) netip.AddrPort { return netip.AddrPortFrom(w.ip(p), serverPort) }

func (w *world) vip(p *lab.Pod) netip.AddrPort {
	i := map[*lab.Pod]int{w.near: 1, w.far: 2}[p]
	if w.ipv6 {
		return netip.AddrPortFrom(lab.VIP6(i), vipPort)
	}
	return netip.AddrPortFrom(lab.VIP4(i), vipPort)
}

// mustang runs the tool on a node and answers what it prints.
func (w *world) mustang(n *lab.Node, args ...string) string {
	w.t.Helper()
	out, err := n.Mustang(deadline(w.t), args...)
	w.must(err)
	return string(out)
}

// run runs a command line in a namespace.
func (w *world) run(s *lab.Space, format string, args ...any) string {
	w.t.Helper()
	line := fmt.Sprintf(format, args...)
	cmd := s.Command(deadline(w.t), strings.Fields(line)...)
	var said strings.Builder // ip complains of others' namespaces that go while it lists links
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		w.t.Fatalf("%s: %v: %s%s", line, err, out, &said)
	}
	return string(out)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not so after %s: %s", patience, what)
		}
	}
}
