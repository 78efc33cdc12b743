// SPDX-License-Identifier: Apache-2.0

package samehost

// Does the node's firewall see the traffic between its pods?

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
)

// FirewallFact is the name in report.Document.Facts of whether the node's FORWARD
// chain stops traffic between two of its pods: in a mode, by mustang or, with "",
// without eBPF.
func FirewallFact(mode, by string) string {
	return strings.TrimSpace("FORWARD stops traffic between pods, " + mode + " " + by)
}

// firewalls finds out for each of the options. What cannot be built is a failure of
// the fact.
func (s *session) firewalls(ctx context.Context) {
	for i, e := range s.o.Firewall {
		name := FirewallFact(e.Mode, e.By)
		if _, known := s.doc.Facts[name]; known {
			continue
		}
		stops, err := s.firewall(ctx, e, fmt.Sprintf("bnf%d", i))
		if err != nil {
			if errors.Is(err, errors.ErrUnsupported) {
				s.lacking++
			}
			s.doc.Failures[name] = err.Error()
			continue
		}
		s.doc.Facts[name] = stops
	}
}

func (s *session) firewall(ctx context.Context, e Extra, labName string) (stops bool, err error) {
	p := pods{labName: labName, mode: e.Mode, by: lab.NoServices, services: 1, mtu: s.o.MTU, binary: s.o.Binary, v6: s.o.IPv6}
	if e.By != "" {
		p.by = lab.ServiceBy(e.By)
	}
	env, err := p.Up(ctx, s.group.Env(labName))
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
