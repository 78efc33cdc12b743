// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// Pods by hand talk through the programs once they are endpoints, a new tool
// restores the same list, and removal gives the plain kernel path back.
func TestEndpointRoundTrip(t *testing.T) {
	for name, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		t.Run(name, func(t *testing.T) {
			if !noTCX && !datapath.Probe().TCX {
				t.Skip("this kernel has no tcx")
			}
			n := newNode(t)
			n.opts.NoTCX = noTCX
			a, b := n.pod(1), n.pod(2)
			n.ping(a, "10.9.0.2")
			first, err := n.add(a)
			if err != nil {
				t.Fatal(err)
			}
			second, err := n.add(b)
			if err != nil {
				t.Fatal(err)
			}
			if first.Attach != name || first.HostIf != "h1" || first.IP4.String() != "10.9.0.1" || first.IP6.String() != "fd09::1" {
				t.Fatalf("%+v", first)
			}
			want := []state.Endpoint{first, second}
			if d := cmp.Diff(want, n.endpoints(), cmpopts.EquateComparable(netip.Addr{})); d != "" {
				t.Fatal(d)
			}
			n.ping(a, "10.9.0.2")
			n.must(func(e *Engine) error {
				from, _, err := e.Counters(first.ID)
				if err == nil && from.Packets == 0 {
					t.Error("no packet of the pod's was counted")
				}
				return err
			})
			n.must(func(e *Engine) error { return e.RemoveEndpoint(first.ID) })
			n.must(func(e *Engine) error { return e.RemoveEndpoint(second.ID) })
			if got := n.endpoints(); len(got) != 0 {
				t.Fatal(got)
			}
			n.ping(a, "10.9.0.2")
			if q := n.run("tc qdisc show dev h1"); strings.Contains(q, "clsact") {
				t.Errorf("left behind: %s", q)
			}
			third, err := n.add(a)
			if err != nil || third.ID == first.ID {
				t.Fatalf("id %d was used again at once: %v", third.ID, err)
			}
		})
	}
}

func (n *node) ping(from, to string) {
	n.t.Helper()
	n.run("nsenter --net=%s ping -c 1 -W 30 %s", from, to)
}

func TestForeignFiltersStay(t *testing.T) {
	n := newNode(t)
	n.opts.NoTCX = true
	a := n.pod(1)
	n.run("tc qdisc add dev h1 clsact")
	addForeignFilter(t, "h1")
	ep, err := n.add(a)
	if err != nil {
		t.Fatal(err)
	}
	if f := n.run("tc filter show dev h1 ingress"); !strings.Contains(f, "foreign") || !strings.Contains(f, "mustang:") {
		t.Fatalf("filters: %s", f)
	}
	n.must(func(e *Engine) error { return e.RemoveEndpoint(ep.ID) })
	if f := n.run("tc filter show dev h1 ingress"); !strings.Contains(f, "foreign") || strings.Contains(f, "mustang:") {
		t.Fatalf("filters: %s", f)
	}
}

func addForeignFilter(t *testing.T, ifname string) {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		Instructions: asm.Instructions{asm.LoadImm(asm.R0, -1, asm.DWord), asm.Return()},
		License:      "MIT",
	})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	l, err := netlink.LinkByName(ifname)
	if err != nil {
		t.Fatal(err)
	}
	err = netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1,
		},
		Fd: prog.FD(), Name: "foreign", DirectAction: true,
	})
	if err != nil {
		t.Fatal(err)
	}
}

// macvlans makes two pods on one NIC, 10.8.0.1 and 10.8.0.2, and says where their namespaces are.
func (n *node) macvlans() (paths []string) {
	n.t.Helper()
	n.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up")
	for _, i := range []string{"1", "2"} {
		pod := n.name + "-m" + i
		n.namespace(pod)
		n.run("ip link add link up0 name mv%s netns %s type macvlan mode bridge", i, pod)
		n.run("ip -n %s link set mv%s name eth0 && ip -n %s link set eth0 up && ip -n %s addr add 10.8.0.%s/24 dev eth0", pod, i, pod, pod, i)
		paths = append(paths, netns.Path(pod))
	}
	return paths
}

// A macvlan has no host end: the programs sit inside the pod.
func TestMacvlanIsServedInsideThePod(t *testing.T) {
	for name, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.opts.NoTCX = noTCX
			paths := n.macvlans()
			for _, path := range paths {
				ep, err := n.add(path)
				if err != nil {
					t.Fatal(err)
				}
				if ep.Placement != state.InPod || ep.Parent == 0 || ep.HostIf != "" {
					t.Fatalf("%+v", ep)
				}
			}
			n.ping(paths[0], "10.8.0.2")
			n.must(func(e *Engine) error {
				from, to, err := e.Counters(n.firstID(e))
				if from.Packets == 0 || to.Packets == 0 {
					t.Errorf("counted %+v from the pod, %+v to it", from, to)
				}
				return err
			})
		})
	}
}

// Who makes an interface inside a pod and names a namespace that the engine does not see gets no pod without programs.
func TestAPodOutOfReachIsNotAdded(t *testing.T) {
	n := newNode(t)
	paths := n.macvlans()
	made, err := n.add(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	n.must(func(e *Engine) error { return e.RemoveEndpoint(made.ID) })
	for name, path := range map[string]string{"nowhere": "/run/netns/nowhere", "another's": paths[1]} {
		spec := EndpointSpec{Netns: path, IfName: "eth0", Owner: state.OwnerCNI, ServicePath: state.PathTC}
		elsewhere := made
		elsewhere.Netns, elsewhere.Owner = path, state.OwnerCNI
		spec.Made = &elsewhere
		err := n.do(func(e *Engine) error { _, err := e.AddEndpoint(context.Background(), spec); return err })
		if err == nil || !strings.Contains(err.Error(), "cannot be opened from here") {
			t.Errorf("%s: %v", name, err)
		}
		n.must(func(e *Engine) error {
			list, err := e.Endpoints()
			if len(list) != 0 {
				t.Errorf("%s: it left %+v", name, list)
			}
			return err
		})
	}
}

func (n *node) firstID(e *Engine) uint32 {
	n.t.Helper()
	list, err := e.Endpoints()
	if err != nil || len(list) == 0 {
		n.t.Fatal(list, err)
	}
	return list[0].ID
}

func TestEndpointMistakesAreOneSentence(t *testing.T) {
	n := newNode(t)
	a := n.pod(1)
	b := n.pod(2)
	if _, err := n.add(a); err != nil {
		t.Fatal(err)
	}
	n.run("ip -n %s-p2 addr add 10.9.0.1/32 dev eth0 && ip -n %s-p2 addr del 10.9.0.2/32 dev eth0", n.name, n.name)
	elsewhere := n.name + "-x"
	n.namespace(elsewhere)
	n.run("ip -n %s link add far type veth peer name near && ip -n %s link set far netns %s-p2 && ip -n %s-p2 link set far name eth9 && ip -n %s-p2 addr add 10.9.9.9/32 dev eth9", elsewhere, elsewhere, n.name, n.name, n.name)
	n.run(`ip -n %s-p2 link add "$(printf 'x\033c')" type veth peer name y`, n.name)
	before := n.endpoints()
	for name, tc := range map[string]struct {
		spec EndpointSpec
		want []string
	}{
		"no namespace":        {EndpointSpec{Netns: "/var/run/netns/none-such", IfName: "eth0"}, []string{"netns /var/run/netns/none-such", "ip netns"}},
		"not a namespace":     {EndpointSpec{Netns: "/etc/hostname", IfName: "eth0"}, []string{"not a network namespace"}},
		"no interface":        {EndpointSpec{Netns: a, IfName: "eth7"}, []string{`"eth7"`, "it has", "eth0"}},
		"a name of a pod's":   {EndpointSpec{Netns: b, IfName: "eth7"}, []string{"eth0", `"x\x1bc"`}},
		"loopback":            {EndpointSpec{Netns: a, IfName: "lo"}, []string{"loopback", "give"}},
		"already added":       {EndpointSpec{Netns: a, IfName: "eth0"}, []string{"already", "mustang ep rm"}},
		"address taken":       {EndpointSpec{Netns: b, IfName: "eth0"}, []string{"10.9.0.1", "belongs to endpoint", "mustang ep rm"}},
		"the node's own":      {EndpointSpec{Netns: netns.Path(n.name), IfName: "h1"}, []string{"h1"}},
		"peer somewhere else": {EndpointSpec{Netns: b, IfName: "eth9"}, []string{"other end of eth9", "nsenter"}},
	} {
		err := n.do(func(e *Engine) error { _, err := e.AddEndpoint(t.Context(), tc.spec); return err })
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		for _, w := range tc.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", name, err, w)
			}
		}
	}
	if d := cmp.Diff(before, n.endpoints(), cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Error(d)
	}
}

// A pod that died without a word makes room for the one that takes its name
// and address.
func TestADeadPodMakesRoom(t *testing.T) {
	n := newNode(t)
	a := n.pod(1)
	old, err := n.add(a)
	if err != nil {
		t.Fatal(err)
	}
	if err := netns.Delete(a); err != nil {
		t.Fatal(err)
	}
	n.run("ip link del h1 2>/dev/null || true")
	if err := netns.Create(a); err != nil {
		t.Fatal(err)
	}
	n.connect(n.name+"-p1", 1)
	ep, err := n.add(a)
	if err != nil {
		t.Fatal(err)
	}
	if got := n.endpoints(); len(got) != 1 || got[0].ID != ep.ID || ep.ID == old.ID || ep.NetnsCookie == old.NetnsCookie {
		t.Fatalf("%+v after %+v: %+v", ep, old, got)
	}
}

// The store may be lost: endpoints stay at work, and can be removed.
func TestALostStoreDoesNotStopEndpoints(t *testing.T) {
	for name, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.opts.NoTCX = noTCX
			a, b := n.pod(1), n.pod(2)
			for _, p := range []string{a, b} {
				if _, err := n.add(p); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.RemoveAll(n.scope.StateDir); err != nil {
				t.Fatal(err)
			}
			if got := n.endpoints(); len(got) != 2 || got[0].HostIf != "h1" || got[1].HostIf != "h2" {
				t.Fatal(got)
			}
			n.ping(a, "10.9.0.2")
			n.must(func(e *Engine) error { return e.RemoveEndpoint(n.firstID(e)) })
			if got := n.endpoints(); len(got) != 1 {
				t.Fatal(got)
			}
			n.ping(a, "10.9.0.2")
		})
	}
}

// Another build's programs are replaced in place, under running traffic.
func TestUpgradeReplacesTheProgramsInPlace(t *testing.T) {
	n := newNode(t)
	a, b, c := n.pod(1), n.pod(2), n.pod(3)
	for _, p := range []string{a, b} {
		if _, err := n.add(p); err != nil {
			t.Fatal(err)
		}
	}
	ids := func() (out []uint32, current bool) {
		n.must(func(e *Engine) error {
			s, err := e.Status()
			for _, p := range s.Programs {
				out = append(out, p.ID)
			}
			current = s.Current
			return err
		})
		return out, current
	}
	before, current := ids()
	if !current || len(before) != 11 { // two at a host end, nine at the cgroup
		t.Fatal(before, current)
	}
	entries := n.entryPrograms()
	n.becomesAnotherBuilds()
	if _, current := ids(); current {
		t.Fatal("another build is not noticed")
	}
	if _, err := n.add(c); err != nil {
		t.Fatal(err)
	}
	after, current := ids()
	if !current || len(after) != len(before) {
		t.Fatal(after, current)
	}
	for i := range after {
		if after[i] == before[i] {
			t.Errorf("program %d was not replaced", i)
		}
	}
	for pin, program := range n.entryPrograms() {
		if before, ok := entries[pin]; ok && before == program {
			t.Errorf("the entry program behind %s was not replaced", pin)
		}
	}
	n.ping(a, "10.9.0.2")
}

// An agent replaces them though no pod comes.
func TestUpgradeWaitsForNoPod(t *testing.T) {
	n := newNode(t)
	a, b := n.pod(1), n.pod(2)
	upgrades := func(want bool) {
		t.Helper()
		n.must(func(e *Engine) error {
			did, err := e.Upgrade()
			if current, _ := e.dp.Current(); did != want || want && !current {
				t.Errorf("upgraded: %v, want %v; current: %v", did, want, current)
			}
			return err
		})
	}
	upgrades(false) // there are no programs
	for _, p := range []string{a, b} {
		if _, err := n.add(p); err != nil {
			t.Fatal(err)
		}
	}
	upgrades(false)
	entries := n.entryPrograms()
	n.becomesAnotherBuilds()
	upgrades(true)
	upgrades(false)
	for pin, program := range n.entryPrograms() {
		if entries[pin] == program {
			t.Errorf("the entry program behind %s was not replaced", pin)
		}
	}
	n.ping(a, "10.9.0.2")
}

// entryPrograms are the ids of the programs behind endpoints' links, by pin.
func (n *node) entryPrograms() map[string]ebpf.ProgramID {
	n.t.Helper()
	out := map[string]ebpf.ProgramID{}
	pins, err := filepath.Glob(filepath.Join(n.scope.BPFFS, "links", "ep-*"))
	if err != nil || len(pins) == 0 && datapath.Probe().TCX {
		n.t.Fatal(pins, err)
	}
	for _, pin := range pins {
		l, err := link.LoadPinnedLink(pin, nil)
		if err != nil {
			n.t.Fatal(err)
		}
		info, err := l.Info()
		l.Close()
		if err != nil {
			n.t.Fatal(err)
		}
		out[pin] = info.Program
	}
	return out
}

// becomesAnotherBuilds makes the tables say that another build left the programs.
func (n *node) becomesAnotherBuilds() {
	n.t.Helper()
	n.must(func(e *Engine) error {
		meta, err := e.dp.GetMeta()
		if err != nil {
			return err
		}
		meta.Build[0]++
		return e.dp.PutMeta(meta)
	})
}

// The program at a parent is replaced however it is held, also by an endpoint
// that has nothing to do with that parent.
func TestUpgradeReplacesTheParentsProgram(t *testing.T) {
	for name, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.opts.NoTCX = noTCX
			if !noTCX && !datapath.Probe().TCX {
				t.Skip("this kernel has no tcx")
			}
			n.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up")
			pod := n.name + "-m1"
			n.namespace(pod)
			n.run("ip link add link up0 name mv1 netns %s type macvlan mode bridge", pod)
			n.run("ip -n %s link set mv1 name eth0 && ip -n %s link set eth0 up && ip -n %s addr add 10.8.0.1/24 dev eth0", pod, pod, pod)
			if _, err := n.add(netns.Path(pod)); err != nil {
				t.Fatal(err)
			}
			before := egressProgram(t, "up0", noTCX)
			n.becomesAnotherBuilds()
			if _, err := n.add(n.pod(1)); err != nil {
				t.Fatal(err)
			}
			if after := egressProgram(t, "up0", noTCX); after == before {
				t.Errorf("program %d was not replaced", before)
			}
		})
	}
}

// egressProgram is the id of the one program at an interface's egress.
func egressProgram(t *testing.T, ifname string, filter bool) uint32 {
	t.Helper()
	l, err := netlink.LinkByName(ifname)
	if err != nil {
		t.Fatal(err)
	}
	var ids []uint32
	if filter {
		filters, err := netns.Filters(l, netlink.HANDLE_MIN_EGRESS)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range filters {
			ids = append(ids, uint32(f.(*netlink.BpfFilter).Id))
		}
	} else {
		found, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: ebpf.AttachTCXEgress})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range found.Programs {
			ids = append(ids, uint32(p.ID))
		}
	}
	if len(ids) != 1 {
		t.Fatalf("programs at the egress of %s: %v", ifname, ids)
	}
	return ids[0]
}

func TestStatusWarnsOfBypassedFirewall(t *testing.T) {
	n := newNode(t)
	if _, err := n.add(n.pod(1)); err != nil {
		t.Fatal(err)
	}
	n.run("nft add table ip t && nft 'add chain ip t f { type filter hook forward priority 0; }' && nft add rule ip t f ip daddr 1.2.3.4 drop")
	n.must(func(e *Engine) error {
		s, err := e.Status()
		want := []ForwardRules{{Backend: "nftables", Table: "ip t", Chain: "f", Rules: 1}}
		if d := cmp.Diff(want, s.Bypassed); d != "" || len(s.Warnings) == 0 {
			t.Error(d, s.Warnings)
		}
		return err
	})
}

// One rule that asks for connections has each of the node's tracked, by nftables'
// own expressions or iptables'; status names its chain.
func TestStatusSaysWhoTracksConnections(t *testing.T) {
	for _, c := range []struct{ rules, want string }{
		{"nft add rule ip t f ip daddr 1.2.3.4 drop", ""},
		{"nft add rule ip t f ct state invalid drop", "chain f of table ip t"},
		{"nft add chain ip t n '{ type nat hook postrouting priority 100; }' && nft add rule ip t n ip saddr 1.2.3.4 masquerade", "chain n of table ip t"},
		{"iptables-nft -A OUTPUT -m comment --comment x -d 1.2.3.4 -j DROP", ""},
		{"iptables-nft -A OUTPUT -d 1.2.3.4 -m conntrack --ctstate INVALID -j DROP", "chain OUTPUT of table ip filter"},
		{"iptables-nft -t nat -A POSTROUTING -s 1.2.3.4 -j MASQUERADE", "chain POSTROUTING of table ip nat"},
	} {
		n := newNode(t)
		if _, err := n.add(n.pod(1)); err != nil {
			t.Fatal(err)
		}
		n.run("%s", "nft add table ip t && nft 'add chain ip t f { type filter hook forward priority 0; }' && "+c.rules)
		n.must(func(e *Engine) error {
			s, err := e.Status()
			if got := strings.Join(s.Tracking, ", "); got != c.want {
				t.Errorf("%s: %q, want %q", c.rules, got, c.want)
			}
			return err
		})
	}
}
