// SPDX-License-Identifier: Apache-2.0

package samehost

// Does the node's firewall see the traffic between its pods?

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
)

// FirewallFact is the name in report.Document.Facts of whether the node's FORWARD
// chain stops traffic between two of its pods: in a mode, by mustang or, with "",
// without eBPF.
func FirewallFact(mode, by string) string {
	return strings.TrimSpace("FORWARD stops traffic between pods, " + mode + " " + by)
}

// facts are what the run finds out of the options.
func (o Options) facts() (out []run.Fact) {
	for i, e := range o.Firewall {
		p := pods{labName: fmt.Sprintf("bnf%d", i), mode: e.Mode, by: lab.NoServices, services: 1, mtu: o.MTU, binary: o.Binary, v6: o.IPv6}
		if e.By != "" {
			p.by = lab.ServiceBy(e.By)
		}
		out = append(out, run.Fact{Name: FirewallFact(e.Mode, e.By), Find: p.firewall})
	}
	return out
}

// firewall tries whether FORWARD stops traffic between two such pods.
func (p pods) firewall(ctx context.Context, l runner.Launcher, cgroup string) (stops bool, err error) {
	tool := "iptables-nft"
	if p.v6 {
		tool = "ip6tables-nft"
	}
	if _, err := exec.LookPath(tool); err != nil {
		return false, fmt.Errorf("whether the host's firewall sees pods is tried by %s: install the package iptables (%w)", tool, errors.ErrUnsupported)
	}
	env, err := p.Up(ctx, cgroup)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, env.Close()) }()
	target := env.Paths()[0].Target
	if _, err := l.Sample(ctx, target, string(load.RR)); err != nil {
		return false, fmt.Errorf("pods do not reach each other without a firewall: %w", err)
	}
	out, err := env.(*podsEnv).lab.Node().Command(ctx, tool, "-P", "FORWARD", "DROP").CombinedOutput()
	if err != nil {
		return false, fmt.Errorf("close FORWARD by %s (package iptables): %w: %s", tool, err, out)
	}
	_, err = l.Sample(ctx, target, string(load.RR))
	if cause := context.Cause(ctx); cause != nil {
		return false, cause
	}
	return err != nil, nil
}
