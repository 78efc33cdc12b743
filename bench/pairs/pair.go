// SPDX-License-Identifier: Apache-2.0

// Package pairs has contestants on two nodes that a wire joins: the nodes themselves,
// pods by the kernel's routing and by its VXLAN, pods by mustang, pods that are on the
// wire themselves.
package pairs

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
)

// Ports: all servers of an environment are up at once.
const (
	podPort     = 5201
	backendPort = 5202
	nodePort    = 5203
	vipPort     = 80
)

// Ways to reach the server, besides report's.
const (
	ToNode     = "node"         // from a pod to the other node itself
	NodeToNode = "node-to-node" // no pod at all
)

// Common is what all contestants of a run share.
type Common struct {
	Binary string // mustang
	MTU    int
	IPv6   bool
}

// Pair is a contestant: two nodes, a pod on each.
type Pair struct {
	Common
	Label string        // its name; a path's subject is that and the way
	Lab   string        // 1 to 6 letters and digits, unique among those that are up
	Mode  lab.Mode      // how pods are connected; "" is veth
	By    lab.ServiceBy // none: pods without mustang
	Join  lab.Join
	Bare  bool   // no pods: from node to node
	Rules string // nftables, in both nodes
	// Ways are of pods: report.PodIP, report.ClusterIP, ToNode, NodeToNode.
	Ways       []string
	Masquerade bool // pods wear their node's address towards other nodes
	Edge       bool // mustang's Services for clients outside, at the nodes' NICs
}

// Name implements run.Contestant.
func (p Pair) Name() string { return p.Label }

// ID names the subject of a way.
func ID(label, way string) string {
	switch way {
	case report.PodIP:
		return label + ", pod IP"
	case report.ClusterIP:
		return label + ", ClusterIP"
	case ToNode:
		return label + ", pod to node"
	case NodeToNode:
		return label + ", node to node"
	}
	return label
}

type env struct {
	lab      *lab.Lab
	extra    []interface{ Close() error } // before the lab
	paths    []run.Path
	programs json.RawMessage
}

func (e *env) Paths() []run.Path           { return e.paths }
func (e *env) ProgramSet() json.RawMessage { return e.programs }

func (e *env) Close() error {
	err := e.lab.Close()
	for _, c := range e.extra {
		err = errors.Join(err, c.Close())
	}
	return err
}

// Up implements run.Contestant.
func (p Pair) Up(ctx context.Context, cgroup string) (_ run.Env, err error) {
	p.Mode = cmp.Or(p.Mode, lab.Veth)
	l, err := lab.New(ctx, lab.Config{Name: p.Lab, Nodes: 2, Mode: p.Mode, Services: p.By, MTU: p.MTU, Binary: p.Binary, CgroupRoot: cgroup,
		BridgeNF: p.Mode == lab.Bridge && p.By != lab.NoServices && !p.mustang()})
	if err != nil {
		return nil, err
	}
	e := &env{lab: l}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if p.Bare {
		n := l.Nodes()
		e.add(p, report.Loopback, p.target(&n[0].Space, &n[1].Space, n[1].Wire4, n[1].Wire6, podPort))
		return e, p.rules(ctx, l)
	}
	if err := p.pods(ctx, e); err != nil {
		return nil, err
	}
	if out, err := l.Mustang(ctx, "status", "-o", "json"); p.mustang() && err == nil && json.Valid(out) {
		e.programs = out
	}
	return e, p.rules(ctx, l)
}

func (p Pair) mustang() bool {
	return p.By == lab.MustangTC || p.By == lab.MustangSocket || p.By == lab.Mustang
}

func (p Pair) target(client, server *lab.Space, v4, v6 netip.Addr, port uint16) runner.Target {
	at := netip.AddrPortFrom(v4, port)
	if p.IPv6 {
		at = netip.AddrPortFrom(v6, port)
	}
	return runner.Target{ClientNS: client.NetNS, ServerNS: server.NetNS, ClientCgroup: client.Cgroup, ServerCgroup: server.Cgroup, Dial: at, Listen: at}
}

func (e *env) add(p Pair, way string, t runner.Target) {
	e.paths = append(e.paths, run.Path{Target: t, Subject: report.Subject{ID: ID(p.Label, way), Contestant: p.Label, Mode: string(p.Mode),
		By: string(p.By), Via: way, Backend: run.BackendVersion(string(p.By))}})
}

// pods joins the nodes and adds a pod to each, and the ways between them.
func (p Pair) pods(ctx context.Context, e *env) error {
	if err := e.lab.Join(ctx, p.Join); err != nil {
		return err
	}
	first, second := e.lab.Nodes()[0], e.lab.Nodes()[1]
	client, err := first.AddPod(ctx, "client")
	if err != nil {
		return err
	}
	server, err := second.AddPod(ctx, "server")
	if err != nil {
		return err
	}
	if p.Edge {
		for _, n := range e.lab.Nodes() {
			if _, err := n.Mustang(ctx, "edge", "set", "--dev", lab.Uplink, "--dev", lab.Wire); err != nil {
				return err
			}
		}
	}
	for _, way := range p.Ways {
		switch way {
		case report.PodIP:
			e.add(p, way, p.target(&client.Space, &server.Space, server.IPv4, server.IPv6, podPort))
		case ToNode:
			e.add(p, way, p.target(&client.Space, &second.Space, second.Wire4, second.Wire6, nodePort))
		case NodeToNode:
			e.add(p, way, p.target(&first.Space, &second.Space, second.Wire4, second.Wire6, nodePort))
		case report.ClusterIP:
			t := p.target(&client.Space, &server.Space, server.IPv4, server.IPv6, backendPort)
			if err := p.service(ctx, first, &t); err != nil {
				return err
			}
			e.add(p, way, t)
		}
	}
	return nil
}

// service puts a Service before a target's server.
func (p Pair) service(ctx context.Context, n *lab.Node, t *runner.Target) error {
	vip := lab.VIP4(1)
	if p.IPv6 {
		vip = lab.VIP6(1)
	}
	t.Dial = netip.AddrPortFrom(vip, vipPort)
	return n.AddServices(ctx, []lab.Service{{VIP: vip, Port: vipPort, Protocol: "tcp", Backends: []netip.AddrPort{t.Listen}}})
}

// masquerade is what an overlay's plugin adds: pods' addresses mean nothing outside.
const masquerade = `table inet masq { chain post { type nat hook postrouting priority srcnat;
 ip saddr 10.1.0.0/16 ip daddr != 10.1.0.0/16 masquerade
 ip6 saddr fd00:10:1::/64 ip6 daddr != fd00:10:1::/64 masquerade
 }
}
`

// rules loads nftables' rules into both nodes.
func (p Pair) rules(ctx context.Context, l *lab.Lab) error {
	text := p.Rules
	if p.Masquerade {
		text += masquerade
	}
	if text == "" {
		return nil
	}
	for _, n := range l.Nodes() {
		cmd := n.Command(ctx, "nft", "-f", "-")
		cmd.Stdin = bytes.NewReader([]byte(text))
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: load rules by nft (package nftables): %w: %s", p.Label, err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// Rules of nodes whose traffic the kernel tracks, and of nodes that except it.
const (
	Tracked = `table inet tracked {
 chain in { type filter hook input priority 0; ct state established,related accept; }
 chain out { type filter hook output priority 0; ct state established,related accept; }
}
`
	NoTrack = Tracked + `table inet untracked {
 chain in { type filter hook prerouting priority raw; notrack; }
 chain out { type filter hook output priority raw; notrack; }
}
`
)
