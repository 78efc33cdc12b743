// SPDX-License-Identifier: Apache-2.0

// Package nodes measures pods on two nodes: every way of joining nodes, beside
// two bare namespaces on the same kind of wire.
package nodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/mustang-net/mustang/bench/load"
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
	// Loopback is a node's own, where nobody has attached anything.
	Loopback = "loopback, bare"
)

// What clients outside are served by.
const (
	edgeName    = "mustang edge"
	proxyName   = "kube-proxy nftables"
	fromOutside = ", outside → "
	toOutside   = ", pod → outside"
)

// contestant is a pair of nodes.
type contestant struct {
	name string
	by   lab.ServiceBy // none: pods without mustang
	join lab.Join
	mode lab.Mode // of its pods; none: the run's
	bare bool     // nodes that nobody has touched
	own  bool     // the nodes' own traffic, with what is attached there
	edge bool     // a client outside uses Services; no pod does
}

func contestants() []contestant {
	return []contestant{
		{name: Base, bare: true},
		{name: BaseAgain, bare: true},
		{name: "kernel routing", by: lab.NoServices, join: lab.Join{Kernel: true, Mode: "direct"}},
		{name: "kernel VXLAN", by: lab.NoServices, join: lab.Join{Kernel: true, Mode: "vxlan"}},
		{name: "bridge + kernel VXLAN", mode: lab.Bridge, by: lab.NoServices, join: lab.Join{Kernel: true, Mode: "vxlan"}}, // flannel's shape
		{name: "mustang direct, legacy", by: lab.MustangTC, join: lab.Join{Mode: "direct", HostRouting: "legacy"}},
		{name: "mustang direct", by: lab.MustangTC, join: lab.Join{Mode: "direct", HostRouting: "ebpf"}, own: true},
		{name: "mustang VXLAN, legacy", by: lab.MustangTC, join: lab.Join{Mode: "vxlan", HostRouting: "legacy"}},
		{name: "mustang VXLAN", by: lab.MustangTC, join: lab.Join{Mode: "vxlan", HostRouting: "ebpf"}},
		// With all that a node can have: Services at its NICs and for its own sockets, and pods that wear its
		// address towards the outside.
		{name: edgeName, by: lab.Mustang, join: lab.Join{Mode: "direct", HostRouting: "ebpf"}, own: true, edge: true},
		{name: proxyName, by: lab.NFT, join: lab.Join{Kernel: true, Mode: "direct"}, own: true, edge: true},
	}
}

// path is one way to a server.
type path struct {
	name   string
	target runner.Target
	modes  []load.Mode // none: all
}

// up builds a contestant's two nodes, which stay until the lab is closed.
func (c contestant) up(ctx context.Context, o Options, i int, cgroup string) (l *lab.Lab, paths []path, err error) {
	by := c.by
	if c.bare {
		by = lab.NoServices
	}
	l, err = lab.New(ctx, lab.Config{
		Name: fmt.Sprintf("bw%d", i), Nodes: 2, Mode: cmp.Or(c.mode, lab.Mode(o.Mode)), Services: by, MTU: o.MTU, BigTCP: o.BigTCP, Binary: o.Binary, CgroupRoot: cgroup,
	})
	if err != nil {
		return nil, nil, err
	}
	paths, err = c.fill(ctx, o, l)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("%s: %w", c.name, err), l.Close())
	}
	return l, paths, nil
}

func (c contestant) fill(ctx context.Context, o Options, l *lab.Lab) ([]path, error) {
	first, second := l.Nodes()[0], l.Nodes()[1]
	to := func(name string, client, server *lab.Space, v4, v6 netip.Addr) path {
		at := netip.AddrPortFrom(v4, port)
		if o.IPv6 {
			at = netip.AddrPortFrom(v6, port)
		}
		return path{name: name, target: runner.Target{ClientNS: client.NetNS, ServerNS: server.NetNS, ClientCgroup: client.Cgroup, ServerCgroup: server.Cgroup, Dial: at, Listen: at}}
	}
	// The nodes' own traffic needs a port of its own: pods' servers share none, nodes do.
	own := func(suffix string) []path {
		loopback := to("loopback"+suffix, &first.Space, &first.Space, netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback())
		loopback.modes = []load.Mode{load.RR, load.CRR}
		return []path{loopback}
	}
	if c.bare {
		out := []path{to(c.name, &first.Space, &second.Space, second.Wire4, second.Wire6)}
		if c.name == Base {
			out = append(out, own(", bare")...)
		}
		return out, nil
	}
	if c.edge {
		return c.fillEdge(ctx, o, l, own, to)
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
	toNode := to(c.name+", pod to node", &client.Space, &second.Space, second.Wire4, second.Wire6)
	// Its server is up beside that of the node's own traffic.
	toNode.target.Dial = netip.AddrPortFrom(toNode.target.Dial.Addr(), port+1)
	toNode.target.Listen = toNode.target.Dial
	out := []path{pod, toNode}
	if c.by != lab.NoServices {
		vip := lab.VIP4(1)
		if o.IPv6 {
			vip = lab.VIP6(1)
		}
		// Its server is up beside the pod IP's: it has a port of its own.
		backend := netip.AddrPortFrom(pod.target.Listen.Addr(), port+1)
		service := lab.Service{VIP: vip, Port: vipPort, Protocol: "tcp", Backends: []netip.AddrPort{backend}}
		if err := first.AddServices(ctx, []lab.Service{service}); err != nil {
			return nil, err
		}
		cluster := path{name: c.name + ", ClusterIP", target: pod.target}
		cluster.target.Dial, cluster.target.Listen = netip.AddrPortFrom(vip, vipPort), backend
		out = append(out, cluster)
	}
	if c.own {
		out = append(out, to("node to node, beside "+c.name, &first.Space, &second.Space, second.Wire4, second.Wire6))
		out = append(out, own(", beside "+c.name)...)
	}
	return out, nil
}

// between makes a path between two spaces.
type between func(name string, client, server *lab.Space, v4, v6 netip.Addr) path

// fillEdge is for contestants that serve a client outside: new connections to a
// pod of the node that it uses, and of the other; and whose pods use a server there.
func (c contestant) fillEdge(ctx context.Context, o Options, l *lab.Lab, own func(string) []path, to between) (out []path, err error) {
	if err := l.WireClients(); err != nil {
		return nil, err
	}
	first, second, outside := l.Nodes()[0], l.Nodes()[1], l.Outside()
	nics := [][]string{{lab.Uplink, lab.Wire, lab.ClientWire}, {lab.Uplink, lab.Wire}}
	for i, n := range l.Nodes() {
		join := c.join
		if !join.Kernel {
			join.Devices = nics[i] // any of them could carry pods' packets
		}
		if err := n.Join(ctx, join); err != nil {
			return nil, err
		}
	}
	for i, n := range l.Nodes() {
		pod, err := n.AddPod(ctx, fmt.Sprintf("server%d", i+1))
		if err != nil {
			return nil, err
		}
		backend, vip := netip.AddrPortFrom(pod.IPv4, port), lab.VIP4(i+1)
		if o.IPv6 {
			backend, vip = netip.AddrPortFrom(pod.IPv6, port), lab.VIP6(i+1)
		}
		service := lab.Service{VIP: vip, Port: vipPort, Protocol: "tcp", Backends: []netip.AddrPort{backend}}
		if err := first.AddServices(ctx, []lab.Service{service}); err != nil {
			return nil, err
		}
		p := path{name: c.name + fromOutside + []string{"its pod", "other node"}[i], modes: []load.Mode{load.CRR}}
		p.target = runner.Target{ClientNS: outside.NetNS, ServerNS: pod.NetNS, Dial: netip.AddrPortFrom(vip, vipPort), Listen: backend, ServerCgroup: pod.Cgroup}
		out = append(out, p)
	}
	var worn []string
	for i, n := range l.Nodes() {
		if c.join.Kernel {
			err = n.Masquerade(ctx)
		} else {
			worn = lab.MasqueradeArgs()
			_, err = n.Mustang(ctx, "edge", "set", "--dev", strings.Join(nics[i], ","), "--host")
		}
		if err != nil {
			return nil, err
		}
	}
	client, err := first.AddPod(ctx, "client", worn...)
	if err != nil {
		return nil, err
	}
	p := to(c.name+toOutside, &client.Space, &outside.Space, outside.IPv4, outside.IPv6)
	p.modes = []load.Mode{load.RR, load.CRR}
	out = append(out, p)
	out = append(out, to("node to node, beside "+c.name, &first.Space, &second.Space, second.Wire4, second.Wire6))
	return append(out, own(", beside "+c.name)...), nil
}
