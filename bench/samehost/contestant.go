// SPDX-License-Identifier: Apache-2.0

// Package samehost measures pods on one host: every way of connecting them and
// every way of serving Services, beside loopback.
package samehost

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"runtime"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Port is the server's port and the Service's; article A uses it too.
const Port = 5201

// Contestant is something to measure.
type Contestant interface {
	Name() string
	// Up builds the environment, which then stays until Close: samples of all
	// contestants interleave. cgroup is the environment's v2 control group, ""
	// for none; all its loads run there.
	Up(ctx context.Context, cgroup string) (Env, error)
}

// Env is a contestant's environment while it is up.
type Env interface {
	Paths() []Path
	// ProgramSet is what `mustang status -o json` says, nil elsewhere.
	ProgramSet() json.RawMessage
	Close() error
}

// Path is one way to the server.
type Path struct {
	Subject report.Subject
	Target  runner.Target
	Only    []string // scenarios; nil for all
}

// loopback is a namespace of its own with nothing but lo.
type loopback struct {
	name string
	mtu  int // 0 leaves the kernel's 65536
	v6   bool
	only []string
	slow float64 // see runner.Target
}

// NewLoopback is the contestant that others are divided by.
func NewLoopback(name string) Contestant { return loopback{name: name} }

func (l loopback) Name() string { return l.name }

type loopbackEnv struct {
	ns   *os.File
	path Path
}

// Up makes a namespace that is held by a descriptor of this process only: it
// disappears with the process, however that ends.
func (l loopback) Up(_ context.Context, cgroup string) (Env, error) {
	ns, err := newNetNS(l.mtu)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", l.name, err)
	}
	addr := netip.MustParseAddr("127.0.0.1")
	if l.v6 {
		addr = netip.IPv6Loopback()
	}
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd())
	at := netip.AddrPortFrom(addr, Port)
	return &loopbackEnv{ns, Path{
		Subject: report.Subject{ID: l.name, Contestant: l.name, Via: report.Loopback},
		Target:  runner.Target{ClientNS: path, ServerNS: path, Dial: at, Listen: at, Cgroup: cgroup, Slow: l.slow},
		Only:    l.only,
	}}, nil
}

func (e *loopbackEnv) Paths() []Path               { return []Path{e.path} }
func (e *loopbackEnv) ProgramSet() json.RawMessage { return nil }
func (e *loopbackEnv) Close() error                { return e.ns.Close() }

// newNetNS makes a network namespace with lo up. It works on a thread that is
// thrown away (never unlocked), so that no other goroutine can wake up in it.
func newNetNS(mtu int) (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		f, err := unshareNetNS(mtu)
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}

func unshareNetNS(mtu int) (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("create network namespace (root is needed): %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find lo: %w", err)
	}
	if mtu > 0 {
		if err := netlink.LinkSetMTU(lo, mtu); err != nil {
			return nil, fmt.Errorf("set MTU of lo: %w", err)
		}
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return nil, fmt.Errorf("set lo up: %w", err)
	}
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("hold network namespace: %w", err)
	}
	return f, nil
}
