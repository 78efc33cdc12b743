// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
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

const port = 5201

// contestant is two pods, what isolates the server, and by what.
type contestant struct {
	name string
	nft  bool
	kind kind
	size int
}

type kind int

const (
	open      kind = iota // no policy
	addresses             // one rule with so many single addresses
	rules                 // so many rules, each with an address and a port
	perPod                // so many pods with a policy each
)

// base is what mustang's others are divided by; again, it is the A/A control.
const (
	base  = "mustang, no policy"
	again = ", again"
)

// contestants are all cells. The open ones are what ratios are to; mustang's is
// there twice, as a control.
func contestants(o Options) []contestant {
	list := []contestant{{base, false, open, 0}, {base + again, false, open, 0}, {"nft, no policy", true, open, 0}}
	for _, nft := range []bool{false, true} {
		by := map[bool]string{false: "mustang", true: "nft"}[nft]
		for _, n := range o.Sizes {
			list = append(list, contestant{fmt.Sprintf("%s, %d addresses", by, n), nft, addresses, n})
			// A chain is walked rule by rule: beyond this a connection takes milliseconds.
			if !nft || n <= 10_000 {
				list = append(list, contestant{fmt.Sprintf("%s, %d rules", by, n), nft, rules, n})
			}
		}
		for _, n := range o.Pods {
			list = append(list, contestant{Name(by, n), nft, perPod, n})
		}
	}
	return list
}

// PerPod is a contestant of other runs: so many pods of a node with a policy each, by
// mustang or, as a careful author would write it, by nftables on a node that routes.
func PerPod(labName string, nft bool, pods int, binary string) run.Contestant {
	c := contestant{nft: nft, kind: perPod, size: pods}
	by := map[bool]string{false: "mustang", true: "nft"}[nft]
	c.name = Name(by, pods)
	return plugIn{c, labName, Options{Binary: binary}}
}

// Name is that of such a contestant, by mustang or nft.
func Name(by string, pods int) string { return fmt.Sprintf("%s, %d pods with a policy each", by, pods) }

// plugIn is a contestant as run's plug-in.
type plugIn struct {
	contestant
	lab string
	o   Options
}

func (p plugIn) Name() string { return p.name }

// Up implements run.Contestant.
func (p plugIn) Up(ctx context.Context, cgroup string) (run.Env, error) {
	e, err := p.up(ctx, p.o, p.lab, cgroup)
	if err != nil {
		return nil, err
	}
	by := map[bool]string{false: string(lab.Mustang), true: "nft"}[p.nft]
	return plugInEnv{e, report.Subject{ID: p.name, Contestant: p.name, Mode: string(lab.Veth), By: by, Via: report.PodIP, Policies: p.size, Pods: p.size + 1}}, nil
}

type plugInEnv struct {
	*env
	subject report.Subject
}

func (e plugInEnv) Paths() []run.Path           { return []run.Path{{Subject: e.subject, Target: e.target}} }
func (e plugInEnv) ProgramSet() json.RawMessage { return nil }
func (e plugInEnv) Close() error                { return e.lab.Close() }

type env struct {
	lab    *lab.Lab
	target runner.Target
}

// up builds the contestant's lab: veth pods, by mustang as shipped, or plain
// ones whose node forwards and filters.
func (c contestant) up(ctx context.Context, o Options, labName, cgroup string) (e *env, err error) {
	cfg := lab.Config{Name: labName, Mode: lab.Veth, Services: lab.Mustang, LocalMTU: "off", Binary: o.Binary, CgroupRoot: cgroup}
	if c.nft {
		cfg.Services = lab.NoServices
	}
	l, err := lab.New(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	var pods []*lab.Pod
	names := []string{"client", "server"}
	for i := 1; c.kind == perPod && i < c.size; i++ {
		names = append(names, fmt.Sprintf("pod%d", i))
	}
	for _, name := range names {
		var flags []string
		if !c.nft {
			flags = []string{"--labels=app=" + name}
		}
		p, err := l.Node().AddPod(ctx, name, flags...)
		if err != nil {
			return nil, err
		}
		pods = append(pods, p)
	}
	if err := c.isolate(ctx, l, pods); err != nil {
		return nil, err
	}
	at := netip.AddrPortFrom(pods[1].IPv4, port)
	return &env{l, runner.Target{ClientNS: pods[0].NetNS, ServerNS: pods[1].NetNS, Dial: at, Listen: at, ClientCgroup: pods[0].Cgroup, ServerCgroup: pods[1].Cgroup}}, nil
}

func (c contestant) isolate(ctx context.Context, l *lab.Lab, pods []*lab.Pod) error {
	if c.kind == open && !c.nft {
		return nil
	}
	text, argv := c.yaml(pods), l.Node().MustangArgs("policy", "apply", "-f", "-")
	if c.nft {
		text, argv = c.ruleset(pods), []string{"nft", "-f", "-"}
	}
	cmd := l.Node().Command(ctx, argv...)
	cmd.Stdin = bytes.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apply the policies: %w: %s", err, lastOf(out))
	}
	return nil
}

func lastOf(out []byte) []byte { return out[max(0, len(out)-500):] }

// someone is address i of the rules' peers: nobody's, but for the client's in
// the middle, where a list that is walked meets it at the mean.
func (c contestant) someone(i int, client netip.Addr) netip.Addr {
	if i == c.size/2 {
		return client
	}
	return netip.AddrFrom4([4]byte{100, 64 + byte(i>>16), byte(i >> 8), byte(i)})
}

func (c contestant) yaml(pods []*lab.Pod) []byte {
	var b bytes.Buffer
	head := func(name, app string) {
		fmt.Fprintf(&b, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: %s}\nspec:\n  podSelector: {matchLabels: {app: %s}}\n  ingress:\n", name, app)
	}
	client := pods[0].IPv4
	switch c.kind {
	case addresses:
		head("p", "server")
		fmt.Fprintf(&b, "  - ports: [{port: %d}]\n    from:\n", port)
		for i := range c.size {
			fmt.Fprintf(&b, "    - ipBlock: {cidr: %s/32}\n", c.someone(i, client))
		}
	case rules:
		head("p", "server")
		for i := range c.size {
			fmt.Fprintf(&b, "  - ports: [{port: %d}]\n    from: [{ipBlock: {cidr: %s/32}}]\n", port, c.someone(i, client))
		}
	case perPod:
		for _, p := range pods[1:] {
			head(p.Name, p.Name)
			fmt.Fprintf(&b, "  - ports: [{port: %d}]\n    from: [{podSelector: {matchLabels: {app: client}}}]\n", port)
		}
	}
	return b.Bytes()
}

// ruleset is the same in nftables, as a careful author would write it: known
// connections pass first, one map leads from the pod to its own chain, single
// addresses are a set.
func (c contestant) ruleset(pods []*lab.Pod) []byte {
	var b bytes.Buffer
	client, server := pods[0].IPv4, pods[1].IPv4
	b.WriteString("table ip netpol {\n")
	to := map[netip.Addr]string{}
	switch c.kind {
	case addresses:
		b.WriteString("set peers { type ipv4_addr; elements = {")
		for i := range c.size {
			fmt.Fprintf(&b, "%s,", c.someone(i, client))
		}
		fmt.Fprintf(&b, "} }\nchain server { ip saddr @peers tcp dport %d accept; drop; }\n", port)
		to[server] = "server"
	case rules:
		b.WriteString("chain server {\n")
		for i := range c.size {
			fmt.Fprintf(&b, "ip saddr %s tcp dport %d accept\n", c.someone(i, client), port)
		}
		b.WriteString("drop\n}\n")
		to[server] = "server"
	case perPod:
		for i, p := range pods[1:] {
			fmt.Fprintf(&b, "set peers%d { type ipv4_addr; elements = { %s }; }\nchain pod%d { ip saddr @peers%d tcp dport %d accept; drop; }\n", i, client, i, i, port)
			to[p.IPv4] = fmt.Sprintf("pod%d", i)
		}
	}
	b.WriteString("map pods { type ipv4_addr : verdict; ")
	if len(to) > 0 {
		b.WriteString("elements = {")
		for a, chain := range to {
			fmt.Fprintf(&b, "%s : goto %s,", a, chain)
		}
		b.WriteString("} ")
	}
	b.WriteString("}\nchain forward { type filter hook forward priority 0; ct state established,related accept; ip daddr vmap @pods; }\n}\n")
	return b.Bytes()
}
