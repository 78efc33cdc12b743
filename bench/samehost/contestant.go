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

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
)

// Port is the server's port and the Service's; article A uses it too.
const Port = 5201

// Contestant, Env and Path are the run's.
type (
	Contestant = run.Contestant
	Env        = run.Env
	Path       = run.Path
)

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
	ns, err := run.NewNetNS(l.mtu)
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
		Target:  runner.Target{ClientNS: path, ServerNS: path, Dial: at, Listen: at, ClientCgroup: cgroup, ServerCgroup: cgroup, Slow: l.slow},
		Only:    l.only,
	}}, nil
}

func (e *loopbackEnv) Paths() []Path               { return []Path{e.path} }
func (e *loopbackEnv) ProgramSet() json.RawMessage { return nil }
func (e *loopbackEnv) Close() error                { return e.ns.Close() }
