// SPDX-License-Identifier: Apache-2.0

package samehost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mustang-net/mustang/bench/kubeproxy"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
)

// pods is a lab with a client and a server pod on one node.
type pods struct {
	labName  string
	mode     string // report's: bridge-nf-off is a mode here
	by       lab.ServiceBy
	services int // how many, the one under test included
	pods     int // on the node; 0: the client and the server alone
	mtu      int
	binary   string
	v6, udp  bool
	backend  string
	tune     string // report's, parts joined by +
}

// NewPods is a contestant with two pods on one node: labName, 1 to 6 letters and
// digits, is unique among those that are up at once; by is one of AllBy or none.
func NewPods(labName, mode, by, binary string) Contestant {
	return pods{labName: labName, mode: mode, by: lab.ServiceBy(by), services: 1, mtu: Defaults().MTU, binary: binary,
		backend: backend(lab.ServiceBy(by))}
}

// backend names what implements Services, with its version.
func backend(by lab.ServiceBy) string {
	if kubeProxy(by) {
		return kubeproxy.Kind(by).Backend()
	}
	return run.BackendVersion(string(by))
}

func (p pods) Name() string {
	name := p.mode + " " + string(p.by)
	if p.by == lab.NoServices {
		name = p.mode
	}
	if p.pods > 0 {
		name += fmt.Sprintf(" (%d pods)", p.pods)
	}
	if p.by == lab.NoServices {
		return name
	}
	if p.services > 1 {
		name += fmt.Sprintf(" (%d Services)", p.services)
	}
	for _, part := range p.tunes() {
		name += " +" + part
	}
	return name
}

type podsEnv struct {
	lab      *lab.Lab
	paths    []Path
	programs json.RawMessage
}

// labServices are what the lab is to do itself: some Services are done on plain pods, by
// tools of our own.
func (p pods) labServices() lab.ServiceBy {
	if p.by == IPVS || kubeProxy(p.by) {
		return lab.NoServices
	}
	return p.by
}

func (p pods) config(cgroup string) lab.Config {
	cfg := lab.Config{Name: p.labName, Mode: lab.Mode(p.mode), Services: p.labServices(), MTU: p.mtu, Binary: p.binary, CgroupRoot: cgroup}
	p.applyTune(&cfg)
	switch p.mode {
	case report.BridgeNFOff:
		cfg.Mode = lab.Bridge
	case report.PolicyRouting:
		cfg.Mode = lab.Veth
	case report.Bridge:
		// Only the kernel's Services need it; mustang runs at its own best.
		cfg.BridgeNF = kernelServices(p.by)
	}
	return cfg
}

func kernelServices(by lab.ServiceBy) bool {
	return by == lab.IptablesNFT || by == lab.IptablesLegacy || by == lab.NFT || by == IPVS || kubeProxy(by)
}

// Up builds the lab with its pods and Services.
func (p pods) Up(ctx context.Context, cgroup string) (env Env, err error) {
	l, err := lab.New(ctx, p.config(cgroup))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	client, err := l.Node().AddPod(ctx, "client")
	if err != nil {
		return nil, err
	}
	server, err := l.Node().AddPod(ctx, "server")
	if err != nil {
		return nil, err
	}
	for i := 2; i < p.pods; i++ {
		if _, err := l.Node().AddPod(ctx, fmt.Sprintf("pod%d", i)); err != nil {
			return nil, err
		}
	}
	if p.mode == report.PolicyRouting {
		if err := policyRouting(l.Node()); err != nil {
			return nil, err
		}
	}
	addr := server.IPv4
	if p.v6 {
		addr = server.IPv6
	}
	e := &podsEnv{lab: l}
	if err := p.addPaths(ctx, e, runner.Target{ClientNS: client.NetNS, ServerNS: server.NetNS, ClientCgroup: client.Cgroup, ServerCgroup: server.Cgroup}, addr); err != nil {
		return nil, err
	}
	if !kernelServices(p.by) && p.by != lab.NoServices {
		// A mustang without status is still a contestant.
		if out, err := l.Mustang(ctx, "status", "-o", "json"); err == nil && json.Valid(out) {
			e.programs = out
		}
	}
	return e, nil
}

// addPaths adds the Services, and the ways to the server at addr.
func (p pods) addPaths(ctx context.Context, e *podsEnv, target runner.Target, addr netip.Addr) error {
	// All servers are up at once: each has a port of its own.
	target.Listen = netip.AddrPortFrom(addr, Port+1)
	target.Dial = target.Listen
	e.add(p, report.PodIP, "", target)
	if p.by == lab.NoServices {
		return nil
	}
	services, tested := p.serviceList(addr)
	add := e.lab.Node().AddServices
	switch {
	case p.by == IPVS:
		add = func(ctx context.Context, list []lab.Service) error { return addIPVS(ctx, e.lab.Node(), list) }
	case kubeProxy(p.by):
		add = func(ctx context.Context, list []lab.Service) error {
			return addByKubeProxy(ctx, e.lab.Node(), p, list, target, tested)
		}
	}
	if err := add(ctx, services); err != nil {
		return err
	}
	for _, t := range tested {
		target.Dial, target.Listen = t.vip, t.backend
		e.add(p, report.ClusterIP, t.position, target)
	}
	return nil
}

func (e *podsEnv) add(p pods, via, position string, t runner.Target) {
	s := report.Subject{ID: p.Name(), Contestant: p.Name(), Mode: p.mode, By: string(p.by), Tune: p.tune, Pods: p.pods, Via: via, Position: position, Backend: p.backend}
	if p.by != lab.NoServices {
		s.Services = p.services
	}
	s.ID += map[string]string{report.PodIP: ", pod IP", report.ClusterIP: ", ClusterIP"}[via]
	if position != "" {
		s.ID += ", " + position + " rule"
	}
	e.paths = append(e.paths, Path{Subject: s, Target: t})
}

// testedService is one of many that is measured.
type testedService struct {
	vip, backend netip.AddrPort
	position     string // report's; "" where it makes no difference
}

// serviceList returns all Services and those under test. Rules that are scanned
// one by one cost a Service its place in the list: there the middle, which is
// the mean, and the last are tested. Each has a port of its own at the backend.
func (p pods) serviceList(backend netip.Addr) (all []lab.Service, tested []testedService) {
	address := lab.VIP4
	if p.v6 {
		address = lab.VIP6
	}
	if kubeProxy(p.by) {
		address = func(i int) netip.Addr { return kubeVIP(p.v6, i) }
	}
	middle, last := p.services/2+1, 0
	position := ""
	if p.services > 1 && scanned(p.by) {
		position, last = report.Middle, p.services
	}
	for i := 1; i <= p.services; i++ {
		at := netip.AddrPortFrom(backend, Port)
		vip := netip.AddrPortFrom(address(i), Port)
		switch i {
		case middle:
			tested = append(tested, testedService{vip, at, position})
		case last:
			at = netip.AddrPortFrom(backend, Port+2)
			tested = append(tested, testedService{vip, at, report.Last})
		}
		s := lab.Service{VIP: vip.Addr(), Port: Port, Protocol: "tcp", Backends: []netip.AddrPort{at}}
		all = append(all, s)
		if p.udp && (i == middle || i == last) {
			s.Protocol = "udp"
			all = append(all, s)
		}
	}
	return all, tested
}

// scanned says whether Services are rules that are compared one by one.
func scanned(by lab.ServiceBy) bool {
	return by == lab.IptablesNFT || by == lab.IptablesLegacy || kubeProxy(by) && kubeproxy.Kind(by).Scanned()
}

func (e *podsEnv) Paths() []Path               { return e.paths }
func (e *podsEnv) ProgramSet() json.RawMessage { return e.programs }
func (e *podsEnv) Close() error                { return e.lab.Close() }
