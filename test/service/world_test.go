// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/mustang-net/mustang/lab"
)

const (
	serverPort = 8080
	vipPort    = 80
	twinPort   = 81 // a second Service with one backend

	sctpEmptyPort = 8126 // a Service with none
)

var labs atomic.Int32

// world is one lab: a client, two servers behind one Service, one server also behind a twin.
type world struct {
	t       *testing.T
	lab     *lab.Lab
	path    lab.ServiceBy
	client  *lab.Pod
	servers []*lab.Pod
	ipv6    bool
}

func vip(ipv6 bool) netip.Addr {
	if ipv6 {
		return lab.VIP6(100)
	}
	return lab.VIP4(100)
}

func newWorld(t *testing.T, mode lab.Mode, path lab.ServiceBy) *world {
	return newWorldOf(t, lab.Config{Mode: mode, Services: path})
}

func newWorldOf(t *testing.T, cfg lab.Config) *world {
	ctx, cancel := context.WithTimeout(context.Background(), slow(5*time.Minute))
	defer cancel()
	cfg.Name, cfg.Binary = fmt.Sprintf("t%d%c", os.Getpid()%10000, 'a'+labs.Add(1)%26), tool
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
	w := &world{t: t, lab: l, path: cfg.Services}
	w.client = w.pod(ctx, "client")
	for i := range 2 {
		p := w.pod(ctx, fmt.Sprintf("server%d", i))
		w.servers = append(w.servers, p)
		w.startServer(p)
	}
	if err := l.Node().AddServices(ctx, w.services()); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) on(t *testing.T, family string) *world {
	sub := *w
	sub.t, sub.ipv6 = t, family == "ipv6"
	return &sub
}

func (w *world) pod(ctx context.Context, name string) *lab.Pod {
	w.t.Helper()
	p, err := w.lab.Node().AddPod(ctx, name, "--labels=app="+name)
	if err != nil && skippable(err) {
		w.t.Skip(err)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

func (w *world) services() []lab.Service {
	var out []lab.Service
	for _, ipv6 := range []bool{false, true} {
		for _, protocol := range []string{"tcp", "udp", "sctp"} {
			s := lab.Service{VIP: vip(ipv6), Port: vipPort, Protocol: protocol}
			for _, p := range w.servers {
				s.Backends = append(s.Backends, netip.AddrPortFrom(address(p, ipv6), serverPort))
			}
			twin := s
			twin.Port, twin.Backends = twinPort, s.Backends[:1]
			out = append(out, s, twin)
			if protocol == "sctp" {
				same, empty := s, s
				same.Port, empty.Port, empty.Backends = serverPort, sctpEmptyPort, nil
				out = append(out, same, empty)
			}
		}
	}
	return out
}

func address(p *lab.Pod, ipv6 bool) netip.Addr {
	if ipv6 {
		return p.IPv6
	}
	return p.IPv4
}

func (w *world) service() netip.AddrPort { return netip.AddrPortFrom(vip(w.ipv6), vipPort) }
func (w *world) twin() netip.AddrPort    { return netip.AddrPortFrom(vip(w.ipv6), twinPort) }
func (w *world) direct(i int) netip.AddrPort {
	return netip.AddrPortFrom(address(w.servers[i], w.ipv6), serverPort)
}

// startServer runs this test binary as an echo server inside the pod.
func (w *world) startServer(p *lab.Pod) { w.t.Helper(); w.startServerIn(p, nil) }

// startServerIn starts it with attributes of its process.
func (w *world) startServerIn(p *lab.Pod, attr *syscall.SysProcAttr) *lab.Cmd {
	w.t.Helper()
	self, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	ready := filepath.Join(w.t.TempDir(), "ready")
	cmd := p.Command(context.Background(), self)
	cmd.Env = append(cmd.Env, roleVariable+"=server", "NAME="+p.Name, "READY="+ready)
	cmd.Stderr, cmd.SysProcAttr = os.Stderr, attr
	w.start(cmd)
	eventually(w.t, "the server in "+p.Name+" listens", func() bool {
		_, err := os.Stat(ready)
		return err == nil
	})
	return cmd
}

func (w *world) start(cmd *lab.Cmd) {
	w.t.Helper()
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
}

// eventually waits for a condition, and fails the test when it stays false for too long.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(2 * patience)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("still not so after %s: %s", 2*patience, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
