// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// What `why` says is what happens, for every way of doing Services.
func TestWhyAgreesWithWhatHappens(t *testing.T) {
	for _, path := range []state.ServicePath{state.PathBoth, state.PathSocket, state.PathTC} {
		t.Run(string(path), func(t *testing.T) {
			w := newWorld(t)
			client, server := w.veth(1, path), w.veth(2, path)
			w.services(server)
			w.serve(server)
			w.open()
			for _, network := range []string{"tcp", "udp"} {
				for _, x := range []struct {
					to     netip.AddrPort
					reason string
				}{
					{netip.AddrPortFrom(server.IP4, serverPort), ""},
					{netip.AddrPortFrom(server.IP6, serverPort), ""},
					{shop4, ""}, {shop6, ""},
					{empty4, "no_backend"},
					{netip.AddrPortFrom(shop6.Addr(), 81), "service_port"},
				} {
					a := w.why("shop/pod-1", fmt.Sprintf("%s/%s", x.to, network))
					err := talk(client, network, x.to)
					switch {
					case x.reason == "" && (a.Verdict != Forwarded || err != nil):
						t.Errorf("%s %s: %s (%s), and then %v", network, x.to, a.Verdict, a.Sentence, err)
					case x.reason != "" && (a.Verdict != Refused || a.Ways[0].Reason != x.reason || a.Mend == "" || !errors.Is(err, unix.ECONNREFUSED)):
						t.Errorf("%s %s: %+v, and then %v", network, x.to, a, err)
					}
				}
			}
		})
	}
}

// why asks about one family.
func (w *world) why(src, dst string) Answer {
	w.t.Helper()
	answers, err := w.n.Why(src, dst)
	w.check(err)
	if len(answers) != 1 {
		w.t.Fatalf("%s → %s: %d answers", src, dst, len(answers))
	}
	return answers[0]
}

func TestWhyNamesBackendsHooksAndTheMend(t *testing.T) {
	for _, path := range []state.ServicePath{state.PathBoth, state.PathTC} {
		t.Run(string(path), func(t *testing.T) {
			w := newWorld(t)
			w.veth(1, path)
			two, three := w.veth(2, path), w.veth(3, path)
			front := netip.MustParseAddrPort("10.96.0.9:80")
			w.do(func(e *engine.Engine) error {
				return e.AddServices(plain(state.TCP, front, netip.AddrPortFrom(two.IP4, 1), netip.AddrPortFrom(three.IP4, 2)))
			})
			w.open()
			a := w.why("shop/pod-1", front.String())
			var ends []string
			for _, way := range a.Ways {
				ends = append(ends, way.Backend.String())
			}
			slices.Sort(ends)
			if want := []string{"shop/pod-2 10.9.0.2:1", "shop/pod-3 10.9.0.3:2"}; !slices.Equal(ends, want) || a.Verdict != Forwarded || a.Service == nil || len(a.Service.Backends) != 2 {
				t.Errorf("%v: %+v", ends, a)
			}
			text := a.Text()
			for _, part := range []string{"shop/pod-1", "shop/pod-2", "shop/pod-3", "from_pod", "10.96.0.9:80"} {
				if !strings.Contains(text, part) {
					t.Errorf("the text lacks %q:\n%s", part, text)
				}
			}
			if a = w.why("1", "10.96.0.9:81"); !strings.Contains(a.Mend, "80/tcp") {
				t.Errorf("the mend does not name the port that there is: %q", a.Mend)
			}
		})
	}
}

// The programs let a packet pass to a pod whose interface is gone.
func TestWhyBesideAnInterfaceThatIsGone(t *testing.T) {
	w := newWorld(t)
	w.veth(1, state.PathTC)
	two := w.veth(2, state.PathTC)
	w.open()
	warned := func() bool {
		return slices.ContainsFunc(w.why("shop/pod-1", "10.9.0.2:80").Warnings, func(s string) bool { return strings.Contains(s, "is gone") })
	}
	if warned() {
		t.Error("it is there")
	}
	w.check(netns.Do(two.Netns, func() error {
		l, err := netlink.LinkByName(two.IfName)
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}))
	if !warned() {
		t.Errorf("nothing is said of it")
	}
}

// No lock is taken, so what an endpoint's record says of its programs may be old: an
// agent makes links of filters.
func TestWhyBesideAnAgentThatSettles(t *testing.T) {
	if !datapath.Probe().TCX {
		t.Skip("this kernel has no tcx")
	}
	w := newWorld(t)
	w.veth(1, state.PathTC)
	two := w.veth(2, state.PathTC)
	n := w.open()
	two.Attach = datapath.AttachClsact
	w.check(n.store.PutEndpoint(two))
	for _, ways := range [][2]string{{"shop/pod-1", "10.9.0.2:80"}, {"shop/pod-2", "10.9.0.1:80"}} {
		if a := w.why(ways[0], ways[1]); a.Verdict != Forwarded {
			t.Errorf("%v: %s", ways, a.Text())
		}
	}
	// Without either it says so.
	links, err := filepath.Glob(filepath.Join(w.scope.BPFFS, "*", fmt.Sprintf("ep-%d-*", two.ID)))
	w.check(err)
	for _, link := range links {
		w.check(os.Remove(link))
	}
	if answers, err := n.Why("shop/pod-2", "10.9.0.1:80"); err == nil || !strings.Contains(err.Error(), "are not attached") {
		t.Error(answers, err)
	}
}

// A mend is a command only where that does what it says, and no more: an address of
// a Service that has others, or is Kubernetes's, is not to get a Service of its own.
func TestTheMendKnowsWhoseServiceItIs(t *testing.T) {
	w := newWorld(t)
	w.veth(1, state.PathBoth)
	whole := func(owner state.Owner, name string, fronts ...state.ServiceFrontend) state.Service {
		return state.Service{ServiceID: state.ServiceID{Owner: owner, Namespace: "shop", Name: name},
			Ports: []state.ServicePort{{Protocol: state.TCP, Frontends: fronts}}}
	}
	at := func(s string) state.ServiceFrontend {
		return state.ServiceFrontend{AddrPort: netip.MustParseAddrPort(s)}
	}
	external := at("203.0.113.1:80")
	external.Kind = state.ExternalIP
	w.do(func(e *engine.Engine) error {
		sticky := plain(state.TCP, netip.MustParseAddrPort("10.96.0.6:80"))
		sticky.Affinity = time.Hour
		if err := e.AddServices(plain(state.TCP, empty4), sticky, whole(state.OwnerCLI, "named", at("10.96.0.7:80"), external)); err != nil {
			return err
		}
		_, err := e.ChangeServices(state.OwnerKubernetes, []state.Service{whole(state.OwnerKubernetes, "db", at("10.96.0.8:80"))}, nil)
		return err
	})
	w.open()
	for _, x := range []struct{ dst, mend string }{
		{empty4.String(), "`mustang svc add --service 10.96.0.2:80 --protocol tcp --backend ADDRESS:PORT --replace`"},
		{"10.96.0.6:80", "with all that `mustang svc ls -o wide` shows"},
		{"10.96.0.7:80", "with all that `mustang svc ls -o wide` shows"},
		{"203.0.113.1:80", "with all that `mustang svc ls -o wide` shows"},
		{"10.96.0.8:80", "which is kubernetes's, a backend: see why none of its pods is ready"},
		{"10.96.0.8:81", "use a port that the Service has (80/tcp), or add this one to the Service, which is kubernetes's"},
	} {
		if a := w.why("shop/pod-1", x.dst); a.Verdict != Refused || !strings.Contains(a.Mend, x.mend) || strings.Contains(a.Mend, "--service") != strings.Contains(x.mend, "--service") {
			t.Errorf("%s: %s", x.dst, a.Mend)
		}
	}
}

// No program sees an SCTP socket connect: it is by packet, and the backend is
// asked about, wherever else Services are done.
func TestWhySCTPGoesByPacket(t *testing.T) {
	for _, path := range []state.ServicePath{state.PathBoth, state.PathSocket, state.PathTC} {
		t.Run(string(path), func(t *testing.T) {
			w := newWorld(t)
			w.veth(1, path)
			two := w.veth(2, path)
			front, empty := netip.MustParseAddrPort("10.96.0.9:2905"), netip.MustParseAddrPort("10.96.0.9:2906")
			w.do(func(e *engine.Engine) error {
				return e.AddServices(plain(state.SCTP, front, netip.AddrPortFrom(two.IP4, 8080)), plain(state.SCTP, empty))
			})
			w.open()
			if a := w.why("shop/pod-1", front.String()+"/sctp"); a.Verdict != Forwarded || a.Protocol != "sctp" || a.Service == nil || a.Service.At != atPacket {
				t.Errorf("%+v", a)
			}
			if a := w.why("shop/pod-1", empty.String()+"/sctp"); a.Verdict != Refused || a.Ways[0].Reason != "no_backend" {
				t.Errorf("%+v", a)
			}
		})
	}
}

// Where the cgroup is gone, pins of the socket programs' links stay, and lead nobody.
func TestWhyKnowsThatNoProgramSeesSockets(t *testing.T) {
	for _, path := range []state.ServicePath{state.PathBoth, state.PathSocket} {
		t.Run(string(path), func(t *testing.T) {
			w := newWorld(t)
			dir, err := os.MkdirTemp(cgroup, "mustang-observe-")
			w.check(err)
			t.Cleanup(func() { os.Remove(dir) })
			w.scope.CgroupRoot = dir
			client, server := w.veth(1, path), w.veth(2, path)
			w.services(server)
			w.serve(server)
			w.open()
			pins := filepath.Join(w.scope.BPFFS, "links", "sock-*")
			before, err := filepath.Glob(pins)
			w.check(err)
			if a := w.why("shop/pod-1", shop4.String()); a.Service == nil || a.Service.At != atSocket || len(a.Warnings) > 0 {
				t.Errorf("with its cgroup: %+v", a)
			}
			w.check(os.Remove(dir))
			eventually(t, "a warning", func() bool { return len(w.why("shop/pod-1", shop6.String()).Warnings) > 0 })
			for _, x := range []struct {
				network string
				at      netip.AddrPort
				passes  bool
			}{
				{"tcp", shop4, true}, {"tcp", shop6, true}, {"udp", shop4, true}, {"tcp", empty4, false},
			} {
				a := w.why("shop/pod-1", fmt.Sprintf("%s/%s", x.at, x.network))
				if len(a.Warnings) != 1 || !strings.Contains(a.Warnings[0], "attached to no cgroup") {
					t.Errorf("%s %s: %q", x.network, x.at, a.Warnings)
				}
				if path == state.PathSocket {
					if a.Service != nil || a.Ways[0].Reason != "" || !strings.Contains(a.Warnings[0], "no Service leads the sockets of shop/pod-1") {
						t.Errorf("%s %s: a Service leads nobody: %+v", x.network, x.at, a)
					}
					continue
				}
				err := talk(client, x.network, x.at)
				if a.Service == nil || a.Service.At != atPacket || (a.Verdict == Forwarded) != x.passes || (err == nil) != x.passes {
					t.Errorf("%s %s: %+v, and then %v", x.network, x.at, a, err)
				}
			}
			if a := w.why("shop/pod-1", netip.AddrPortFrom(server.IP4, serverPort).String()); len(a.Warnings) > 0 || a.Verdict != Forwarded {
				t.Errorf("no Service: %+v", a)
			}
			if after, err := filepath.Glob(pins); len(before) == 0 || !slices.Equal(before, after) {
				t.Errorf("pins were %q, are %q: %v", before, after, err)
			}
		})
	}
}

func TestWhyFollowsThePacketOutOfTheNodeAndIn(t *testing.T) {
	w := newWorld(t)
	w.veth(1, state.PathBoth)
	w.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up && ip addr add 192.0.2.1/24 dev up0 && ip addr add 2001:db8::1/64 dev up0 nodad")
	w.open()
	for _, x := range []struct{ src, dst, verdict, says string }{
		{"shop/pod-1", "192.0.2.7:99/udp", Forwarded, "leaves the node by up0"},
		{"shop/pod-1", "192.0.2.1", Forwarded, "reaches the node itself"},
		{"shop/pod-1", "198.51.100.1:80", NoRoute, "the node has no route"},
		{"shop/pod-1", "10.9.0.1:99/udp", Forwarded, "reaches the pod itself"},
		{"shop/pod-1", "127.0.0.1", Forwarded, "reaches the pod itself"},
		{"shop/pod-1", "224.0.0.1", Forwarded, "does not pass on"},
		{"shop/pod-1", "fe80::7", NoRoute, "link-local"},
		{"192.0.2.7", "10.9.0.1:80", Forwarded, "reaches shop/pod-1"},
		{"192.0.2.1", "pod-1", Forwarded, "reaches shop/pod-1"},
		{"192.0.2.7", "192.0.2.8", Undecided, "neither end"},
		{"192.0.2.7", "192.0.2.1:30080", Undecided, "for clients outside and for the node's own sockets is not asked"},
	} {
		if a := w.why(x.src, x.dst); a.Verdict != x.verdict || !strings.Contains(a.Sentence, x.says) {
			t.Errorf("%s → %s: %s, %s", x.src, x.dst, a.Verdict, a.Sentence)
		}
	}
	// A node's kernel may forward less than it sends itself.
	for _, x := range []struct{ change, back, dst, says, mend string }{
		{"sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv4.ip_forward=1", "192.0.2.7:1", "the node forwards nothing", "`sysctl -w net/ipv4/ip_forward=1`"},
		{"sysctl -qw net.ipv4.conf.h1.forwarding=0", "sysctl -qw net.ipv4.conf.h1.forwarding=1", "192.0.2.7:1", "the node forwards nothing", "`sysctl -w net/ipv4/conf/h1/forwarding=1`"},
		{"sysctl -qw net.ipv6.conf.all.forwarding=0", "sysctl -qw net.ipv6.conf.all.forwarding=1", "2001:db8::7", "the node forwards nothing", "`sysctl -w net/ipv6/conf/all/forwarding=1`"},
		{"ip rule add from 10.9.0.1 blackhole pref 9", "ip rule del pref 9", "192.0.2.7:1", "the node has no route", "`ip route get 192.0.2.7 from 10.9.0.1 iif h1`"},
	} {
		w.run("%s", x.change)
		if a := w.why("shop/pod-1", x.dst); a.Verdict != NoRoute || !strings.Contains(a.Sentence, x.says) || !strings.Contains(a.Mend, x.mend) {
			t.Errorf("after %s: %+v", x.change, a)
		}
		w.run("%s", x.back)
		if a := w.why("shop/pod-1", x.dst); a.Verdict != Forwarded {
			t.Errorf("after %s: %+v", x.back, a)
		}
	}
	// What forwards by the kernel meets the host's firewall, which nobody asks.
	if text := w.why("shop/pod-1", "192.0.2.7:1").Text(); strings.Contains(text, "firewall") {
		t.Errorf("without a firewall: %s", text)
	}
	w.run("nft add table ip guard && nft 'add chain ip guard f { type filter hook forward priority 0; policy drop; }'")
	if text := w.why("shop/pod-1", "192.0.2.7:1").Text(); !strings.Contains(text, "the host's firewall lets it, which is not asked: chain f of table ip guard (nftables, policy drop)") {
		t.Errorf("with a firewall: %s", text)
	}
	w.check(w.n.dp.Map("mst_programs_v1").Delete(uint32(0)))
	if a := w.why("shop/pod-1", "192.0.2.7:1"); a.Verdict != Dropped || a.Ways[0].Reason != "no_program" {
		t.Errorf("without a program: %+v", a)
	}
	for _, x := range []struct{ src, dst, says string }{
		{"nobody", "10.9.0.1", "ep ls"},
		{"77", "10.9.0.1", "endpoint 77"},
		{"pod-1", "10.9.0.1:0", "between 1 and 65535"},
		{"pod-1", "10.9.0.1:1/icmp", "none of tcp, udp, sctp"},
		{"10.9.0.1", "fd09::2", "no address family in common"},
		{"203.0.113.9", "10.9.0.1", "no route to 203.0.113.9"},
	} {
		if _, err := w.n.Why(x.src, x.dst); err == nil || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%s → %s: %v", x.src, x.dst, err)
		}
	}
}

func TestWhyInsidePodsOnAParentLink(t *testing.T) {
	w := newWorld(t)
	w.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up")
	for i := 1; i <= 2; i++ {
		ns := fmt.Sprintf("%s-p%d", w.name, i)
		w.namespace(ns)
		w.run("ip link add link up0 name eth0 netns %s type macvlan mode bridge && ip -n %s link set eth0 up && ip -n %s addr add 10.9.0.%d/24 dev eth0", ns, ns, ns, i)
		w.endpoint(i, ns, state.PathTC)
	}
	w.services(state.Endpoint{IP4: w.pods[2].IP4, IP6: netip.MustParseAddr("fd09::2")})
	w.open()
	for _, x := range []struct{ dst, says string }{
		{"shop/pod-2:80", "reaches shop/pod-2"},
		{shop4.String(), "reaches shop/pod-2"},
		{"10.9.0.200:80", "leaves the node by up0"},
	} {
		a := w.why("shop/pod-1", x.dst)
		if x.dst == shop4.String() {
			// The pod knows its own network only.
			if a.Verdict != NoRoute {
				t.Errorf("%s without a route: %+v", x.dst, a)
			}
			w.run("ip -n %s-p1 route add default via 10.9.0.254", w.name)
			a = w.why("shop/pod-1", x.dst)
		}
		if a.Verdict != Forwarded || !strings.Contains(a.Sentence, x.says) {
			t.Errorf("%s: %s, %s", x.dst, a.Verdict, a.Sentence)
		}
		if x.dst == "10.9.0.200:80" && !strings.Contains(a.Text(), "parent_egress") {
			t.Errorf("the parent's hook is not on the way:\n%s", a.Text())
		}
	}
}

// Inside a pod the node is known by its own interface on the link: by that its packets
// come, also those of a kubelet's probes, which no policy stops.
func TestWhyKnowsTheNodeOnAParentLink(t *testing.T) {
	w := newWorld(t)
	w.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up")
	w.run("ip link add link up0 name mv-up0 type macvlan mode bridge && ip addr add 10.9.0.254/24 dev mv-up0 && ip link set mv-up0 up && ip addr add 192.0.2.1/32 dev up0")
	ns := w.name + "-p2"
	w.namespace(ns)
	w.run("ip link add link up0 name eth0 netns %s type macvlan mode bridge && ip -n %s link set eth0 up && ip -n %s addr add 10.9.0.2/24 dev eth0", ns, ns, ns)
	w.endpoint(2, ns, state.PathTC)
	w.apply(map[string]string{"deny-in": denyIn})
	w.open()
	for src, verdict := range map[string]string{"10.9.0.254": Forwarded, "192.0.2.1": Forwarded, "10.9.0.200": Dropped} {
		if a := w.why(src, "10.9.0.2"); a.Verdict != verdict {
			t.Errorf("%s: %s", src, a.Text())
		}
	}
	w.run("ping -c 1 -W 10 10.9.0.2")
}

// Asking changes nothing: every table, byte by byte, on every CPU.
func TestAskingChangesNothing(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathTC), w.veth(2, state.PathTC)
	w.services(server)
	w.serve(server)
	w.open()
	w.check(talk(client, "tcp", shop4))
	w.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip addr add 192.0.2.1/24 dev up0")
	// Pods send by themselves now and then (neighbour and router discovery). What asking changes,
	// it changes every time.
	var after map[string][]byte
	eventually(t, "asking leaves every table as it was", func() bool {
		before := w.dump()
		for _, q := range [][2]string{
			{"pod-1", "pod-2:8080"}, {"pod-1", shop4.String()}, {"pod-1", "10.96.0.2:80/udp"}, {"pod-1", "10.96.0.1:99"},
			{"pod-1", "pod-2"}, {"192.0.2.1", "10.9.0.2"}, {"pod-2", "192.0.2.9:1/udp"},
		} {
			_, err := w.n.Why(q[0], q[1])
			w.check(err)
		}
		after = w.dump()
		same := true
		for _, name := range slices.Sorted(maps.Keys(before)) {
			if !bytes.Equal(before[name], after[name]) {
				t.Logf("table %s has changed", name)
				same = false
			}
		}
		return same
	})
	if err := talk(client, "tcp", shop4); err != nil {
		t.Error(err)
	}
	now := w.dump()
	if !slices.ContainsFunc([]string{"mst_ct_v1", "mst_ct_new_v1", "mst_ct_near_v1"}, func(table string) bool {
		return !bytes.Equal(now[table], after[table])
	}) {
		t.Error("a real connection did not change the flow tables either: the dump does not see them")
	}
}

// dump is the content of every table that can be read.
func (w *world) dump() map[string][]byte {
	w.t.Helper()
	tables, err := w.n.dp.Tables()
	w.check(err)
	out := map[string][]byte{}
	for _, info := range tables {
		m := w.n.dp.Map(info.Name)
		switch m.Type() {
		case ebpf.ProgramArray, ebpf.SkStorage, ebpf.ArrayOfMaps:
			continue
		}
		entries := map[string][]byte{}
		key := make([]byte, m.KeySize())
		for next := m.NextKey(nil, &key); next == nil; next = m.NextKey(bytes.Clone(key), &key) {
			var value []byte
			if info.Type == ebpf.PerCPUArray.String() {
				var cpus [][]byte
				w.check(m.Lookup(key, &cpus))
				value = bytes.Join(cpus, nil)
			} else if value, err = m.LookupBytes(key); err != nil {
				w.t.Fatal(err)
			}
			entries[string(key)] = value
		}
		for _, k := range slices.Sorted(maps.Keys(entries)) {
			out[info.Name] = append(append(out[info.Name], k...), entries[k]...)
		}
	}
	return out
}

// The packets that are asked about are what a kernel would send.
func TestProbesAreWellFormed(t *testing.T) {
	for _, proto := range []uint8{protoTCP, protoUDP, protoSCTP, protoICMP, protoICMPv6} {
		src, dst := netip.MustParseAddrPort("10.9.0.1:61000"), netip.MustParseAddrPort("10.9.0.2:81")
		if proto == protoICMPv6 {
			src, dst = netip.MustParseAddrPort("[fd09::1]:61000"), netip.MustParseAddrPort("[fd09::2]:81")
		}
		f := probe{srcMAC: make([]byte, 6), dstMAC: make([]byte, 6), src: src, dst: dst, proto: proto}.frame()
		h, fault := oracle.Parse(f)
		if fault != "" || h.Proto != proto || h.Src != src.Addr() || h.Dst != dst.Addr() {
			t.Errorf("protocol %d: %v, %+v", proto, fault, h)
		}
		if ip, l4 := oracle.Sums(f, h); ip == oracle.SumBad || l4 != oracle.SumGood {
			t.Errorf("protocol %d: checksums are %s and %s", proto, ip, l4)
		}
		if destination(f) != dst.Addr() {
			t.Errorf("protocol %d goes to %s", proto, destination(f))
		}
	}
}
