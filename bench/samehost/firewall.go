// SPDX-License-Identifier: Apache-2.0

package samehost

// Does the node's firewall see the traffic between its pods?

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
)

// FirewallFact is the name in report.Document.Facts of whether the node's FORWARD
// chain stops traffic between two of its pods, connected in a mode without eBPF.
func FirewallFact(mode string) string { return "FORWARD stops traffic between pods, " + mode }

// firewalls finds out for each mode of the options. A mode that cannot be built is
// a failure of the fact.
func (s *session) firewalls(ctx context.Context) {
	for i, mode := range s.o.Firewall {
		name := FirewallFact(mode)
		if _, known := s.doc.Facts[name]; known {
			continue
		}
		stops, err := s.firewall(ctx, mode, fmt.Sprintf("bnf%d", i))
		if err != nil {
			s.doc.Failures[name] = err.Error()
			continue
		}
		s.doc.Facts[name] = stops
	}
}

func (s *session) firewall(ctx context.Context, mode, labName string) (stops bool, err error) {
	p := pods{labName: labName, mode: mode, by: lab.NoServices, mtu: s.o.MTU, binary: s.o.Binary, v6: s.o.IPv6}
	env, err := p.Up(ctx, "")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, env.Close()) }()
	target := env.Paths()[0].Target
	l := s.launcher(runner.Case{Cores: "same"})
	l.Duration, l.Warmup = 20*time.Millisecond, 0
	if _, err := l.Sample(ctx, target, string(load.RR)); err != nil {
		return false, fmt.Errorf("pods do not reach each other without a firewall: %w", err)
	}
	tool := "iptables-nft"
	if s.o.IPv6 {
		tool = "ip6tables-nft"
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
