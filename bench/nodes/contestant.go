// SPDX-License-Identifier: Apache-2.0

// Package nodes measures pods on two nodes: every way of joining nodes, beside
// two bare namespaces on the same kind of wire.
package nodes

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
)

const (
	port    = 5201
	vipPort = 80
)

// Base is what others are divided by, and BaseAgain the A/A control.
const (
	Base      = "bare namespaces"
	BaseAgain = "bare namespaces, again"
)

// contestant is a pair of nodes.
type contestant struct {
	name  string
	by    lab.ServiceBy // none: pods without mustang
	join  lab.Join
	bare  bool // nodes that nobody has touched
	hosts bool // also from node to node, with what is attached there
}

func contestants() []contestant {
	return []contestant{
		{name: Base, bare: true},
		{name: BaseAgain, bare: true},
		{name: "kernel routing", by: lab.NoServices, join: lab.Join{Kernel: true, Mode: "direct"}},
		{name: "kernel VXLAN", by: lab.NoServices, join: lab.Join{Kernel: true, Mode: "vxlan"}},
		{name: "mustang direct, legacy", by: lab.MustangTC, join: lab.Join{Mode: "direct", HostRouting: "legacy"}},
		{name: "mustang direct", by: lab.MustangTC, join: lab.Join{Mode: "direct", HostRouting: "ebpf"}, hosts: true},
		{name: "mustang VXLAN, legacy", by: lab.MustangTC, join: lab.Join{Mode: "vxlan", HostRouting: "legacy"}},
		{name: "mustang VXLAN", by: lab.MustangTC, join: lab.Join{Mode: "vxlan", HostRouting: "ebpf"}},
	}
}

// path is one way to a server.
type path struct {
	name   string
	target runner.Target
}

// up builds a contestant's two nodes, which stay until the lab is closed.
func (c contestant) up(ctx context.Context, o Options, i int, cgroup string) (l *lab.Lab, paths []path, err error) {
	by := c.by
	if c.bare {
		by = lab.NoServices
	}
	l, err = lab.New(ctx, lab.Config{
		Name: fmt.Sprintf("bw%d", i), Nodes: 2, Mode: lab.Mode(o.Mode), Services: by, MTU: o.MTU, Binary: o.Binary, CgroupRoot: cgroup,
	})
	if err != nil {
		return nil, nil, err
	}
	paths, err = c.fill(ctx, o, l, cgroup)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("%s: %w", c.name, err), l.Close())
	}
	return l, paths, nil
}

func (c contestant) fill(ctx context.Context, o Options, l *lab.Lab, cgroup string) ([]path, error) {
	first, second := l.Nodes()[0], l.Nodes()[1]
	to := func(name string, client, server *lab.Space, v4, v6 netip.Addr) path {
		at := netip.AddrPortFrom(v4, port)
		if o.IPv6 {
			at = netip.AddrPortFrom(v6, port)
		}
		return path{name, runner.Target{ClientNS: client.NetNS, ServerNS: server.NetNS, Dial: at, Listen: at, Cgroup: cgroup}}
	}
	if c.bare {
		return []path{to(c.name, &first.Space, &second.Space, second.Wire4, second.Wire6)}, nil
	}
	if err := l.Join(ctx, c.join); err != nil {
		return nil, err
	}
	client, err := first.AddPod(ctx, "client")
	if err != nil {
		return nil, err
	}
	server, err := second.AddPod(ctx, "server")
	if err != nil {
		return nil, err
	}
	pod := to(c.name+", pod IP", &client.Space, &server.Space, server.IPv4, server.IPv6)
	out := []path{pod}
	if c.by != lab.NoServices {
		vip := lab.VIP4(1)
		if o.IPv6 {
			vip = lab.VIP6(1)
		}
		service := lab.Service{VIP: vip, Port: vipPort, Protocol: "tcp", Backends: []netip.AddrPort{pod.target.Dial}}
		if err := first.AddServices(ctx, []lab.Service{service}); err != nil {
			return nil, err
		}
		cluster := path{c.name + ", ClusterIP", pod.target}
		cluster.target.Dial = netip.AddrPortFrom(vip, vipPort)
		out = append(out, cluster)
	}
	if c.hosts {
		out = append(out, to("node to node, beside "+c.name, &first.Space, &second.Space, second.Wire4, second.Wire6))
	}
	return out, nil
}
