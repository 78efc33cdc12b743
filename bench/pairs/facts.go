// SPDX-License-Identifier: Apache-2.0

package pairs

// What happens between nodes, beside how fast.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
)

// patience is how long a connection may take that may not come about.
const patience = 3 * time.Second

// HidesPods is the fact whether another node sees a pod's node instead of the pod.
func HidesPods(p Pair) run.Fact {
	return run.Fact{Name: "another node sees the pod's node, not the pod: " + p.Label, Find: func(ctx context.Context, _ runner.Launcher, cgroup string) (hidden bool, err error) {
		p.Ways = []string{ToNode}
		up, err := p.Up(ctx, cgroup)
		if err != nil {
			return false, err
		}
		defer func() { err = errors.Join(err, up.Close()) }()
		t := up.Paths()[0].Target
		seen, err := peerOf(t)
		if err != nil {
			return false, err
		}
		return seen == up.(*env).lab.Nodes()[0].Wire4.String(), nil
	}}
}

// peerOf connects over a path, and returns whom the server sees.
func peerOf(t runner.Target) (string, error) {
	server, client := lab.Space{NetNS: t.ServerNS}, lab.Space{NetNS: t.ClientNS}
	var l net.Listener
	if err := server.Do(func() (err error) { l, err = net.Listen("tcp", t.Listen.String()); return err }); err != nil {
		return "", err
	}
	defer l.Close()
	if err := client.Do(func() error {
		c, err := net.DialTimeout("tcp", t.Dial.String(), patience)
		if err == nil {
			c.Close()
		}
		return err
	}); err != nil {
		return "", fmt.Errorf("connect to %s: %w", t.Dial, err)
	}
	c, err := l.Accept()
	if err != nil {
		return "", err
	}
	defer c.Close()
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	return host, err
}

// ServiceWorks is the fact whether pods on the wire reach a Service that their node's
// iptables has.
func ServiceWorks(o OnWire) run.Fact {
	name := "a Service of the node's iptables works, " + o.Kind + " on the wire"
	return run.Fact{Name: name, Find: func(ctx context.Context, _ runner.Launcher, cgroup string) (works bool, err error) {
		o.By = lab.NoServices
		up, err := o.Up(ctx, cgroup)
		if err != nil {
			return false, err
		}
		defer func() { err = errors.Join(err, up.Close()) }()
		t := up.Paths()[0].Target
		if _, err := peerOf(t); err != nil {
			return false, fmt.Errorf("pods do not reach each other: %w", err)
		}
		first := up.(*env).lab.Nodes()[0]
		vip := lab.VIP4(1)
		out, err := first.Command(ctx, "iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "-d", vip.String(), "-j", "DNAT", "--to-destination", t.Listen.String()).CombinedOutput()
		if err != nil {
			return false, fmt.Errorf("add a Service by iptables-nft (package iptables): %w: %s", err, out)
		}
		t.Dial = netip.AddrPortFrom(vip, t.Listen.Port())
		_, err = peerOf(t)
		return err == nil, nil
	}}
}
