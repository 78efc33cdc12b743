// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

func TestFlowsOfRealSocketsAreTold(t *testing.T) {
	for _, path := range []state.ServicePath{state.PathBoth, state.PathTC} {
		t.Run(string(path), func(t *testing.T) {
			w := newWorld(t)
			client, server := w.veth(1, path), w.veth(2, path)
			w.services(server)
			w.serve(server)
			w.open()
			c := w.watch(WatchOptions{})
			for name, x := range map[string]struct {
				network string
				to      netip.AddrPort
				front   netip.AddrPort
			}{
				"tcp4":            {"tcp", netip.AddrPortFrom(server.IP4, serverPort), netip.AddrPort{}},
				"tcp6":            {"tcp", netip.AddrPortFrom(server.IP6, serverPort), netip.AddrPort{}},
				"udp4":            {"udp", netip.AddrPortFrom(server.IP4, serverPort), netip.AddrPort{}},
				"tcp4 by Service": {"tcp", shop4, shop4},
				"tcp6 by Service": {"tcp", shop6, shop6},
				"udp4 by Service": {"udp", shop4, shop4},
				"udp6 by Service": {"udp", shop6, shop6},
			} {
				c.forget()
				if err := talk(client, x.network, x.to); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				like := func(event string) func(f Flow) bool {
					return func(f Flow) bool {
						return f.Event == event && f.Verdict == Forwarded && f.Protocol == x.network &&
							f.Source.Name() == "shop/pod-1" && f.Source.Labels["app"] == "app-1" &&
							f.Destination.Name() == "shop/pod-2" && f.Destination.Port == serverPort &&
							f.Destination.Address.Is4() == x.to.Addr().Is4() && (f.Service != nil) == x.front.IsValid()
					}
				}
				f := c.expect(name+" opened", like(Opened))
				if x.front.IsValid() && (f.Service.Frontend != x.front || f.Service.Number == 0 || f.Service.Backend == 0) {
					t.Errorf("%s: the Service is %+v", name, f.Service)
				}
				if to := (Filter{To: []string{x.to.Addr().String()}}); !to.Match(f) {
					t.Errorf("%s: --to %s does not show %+v", name, x.to.Addr(), f)
				}
				if x.network != "tcp" {
					continue
				}
				// By the socket a Service leaves no trace in the packets that close.
				c.expect(name+" closed", func(f Flow) bool {
					if path == state.PathBoth {
						f.Service = &ServiceRef{}
						return f.Event == Closed && f.Source.Name() == "shop/pod-1" && f.Destination.Name() == "shop/pod-2"
					}
					return like(Closed)(f)
				})
			}
			refusals(t, w, c, path)
		})
	}
}

func refusals(t *testing.T, w *world, c *watcher, path state.ServicePath) {
	t.Helper()
	direction := map[state.ServicePath]string{state.PathBoth: "socket", state.PathTC: "from_pod"}[path]
	for _, x := range []struct {
		reason  uint32
		network string
		to      netip.AddrPort
	}{
		{bpfgen.ReasonNoBackend, "tcp", empty4},
		{bpfgen.ReasonNoBackend, "udp", empty4},
		{bpfgen.ReasonServicePort, "tcp", netip.AddrPortFrom(shop4.Addr(), 81)},
		{bpfgen.ReasonServicePort, "tcp", netip.AddrPortFrom(shop6.Addr(), 81)},
	} {
		c.forget()
		r := bpfgen.Reasons[x.reason]
		if err := talk(w.pods[1], x.network, x.to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s %s %s: %v", r.Name, x.network, x.to, err)
		}
		c.expect(x.network+" "+r.Name, func(f Flow) bool {
			return f.Verdict == Refused && f.Reason == r.Name && f.Sentence == r.Sentence && f.Mend == r.Mend &&
				f.Direction == direction && f.Protocol == x.network && f.Source.Name() == "shop/pod-1" &&
				f.Service != nil && f.Service.Frontend == x.to
		})
	}
}

// Every reason for which a packet of a pod can be dropped, whatever the pod does.
func TestEveryDropThatTrafficCanCauseIsTold(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathBoth), w.veth(2, state.PathBoth)
	w.services(server)
	w.open()
	c := w.watch(WatchOptions{Filter: Filter{Verdicts: []string{Dropped, Refused}}})
	mac, gateway := [6]byte(client.MAC), [6]byte(client.NodeMAC)
	start := func(src, dst netip.Addr) *dptest.Packet { return dptest.Eth(mac, gateway).IP(src, dst) }
	v4 := func() *dptest.Packet { return start(client.IP4, server.IP4) }
	v6 := func() *dptest.Packet { return start(client.IP6, server.IP6) }
	stranger := netip.MustParseAddr("10.9.0.99")
	quoted := start(server.IP4, client.IP4).UDP(7, 7).Frame()[14:]
	for _, x := range []struct {
		reason  uint32
		verdict string
		frames  [][]byte
	}{
		{bpfgen.ReasonEthertype, Dropped, [][]byte{dptest.Eth(mac, gateway).Raw(0x88cc, make([]byte, 60))}},
		{bpfgen.ReasonTruncated, Dropped, [][]byte{v4().TCP(1, 2, oracle.SYN).TotalLen(30).Frame()}},
		{bpfgen.ReasonBadLength, Dropped, [][]byte{v4().UDP(1, 2).Payload(8).TotalLen(500).Frame()}},
		{bpfgen.ReasonBadHeader, Dropped, [][]byte{v6().UDP(1, 2).Payload(8).Byte(0, 0x50).Frame()}},
		{bpfgen.ReasonExtHeaders, Dropped, [][]byte{v6().Ext(60, 8).Ext(60, 8).Ext(60, 8).Ext(60, 8).Ext(60, 8).Ext(60, 8).Ext(60, 8).UDP(1, 2).Frame()}},
		{bpfgen.ReasonSpoofedMAC, Dropped, [][]byte{dptest.Eth([6]byte{2, 9, 9, 9, 9, 9}, gateway).IP(client.IP4, server.IP4).UDP(1, 2).Frame()}},
		{bpfgen.ReasonSpoofedAddress, Dropped, [][]byte{start(stranger, server.IP4).UDP(1, 2).Frame()}},
		{bpfgen.ReasonFragTiny, Dropped, [][]byte{v4().Fragment(0, true, 1).Proto(oracle.TCP).Payload(8).Frame()}},
		{bpfgen.ReasonFragOverlap, Dropped, [][]byte{v4().Fragment(8, true, 2).Proto(oracle.TCP).Payload(16).Frame()}},
		{bpfgen.ReasonFragNoFirst, Dropped, [][]byte{v4().Fragment(800, false, 3).Proto(oracle.UDP).Payload(16).Frame()}},
		{bpfgen.ReasonNoBackend, Refused, [][]byte{start(client.IP4, empty4.Addr()).TCP(1000, 80, oracle.SYN).Frame()}},
		{bpfgen.ReasonServicePort, Refused, [][]byte{start(client.IP6, shop6.Addr()).UDP(1000, 99).Frame()}},
		{bpfgen.ReasonMidstreamNAT, Refused, [][]byte{start(client.IP4, shop4.Addr()).TCP(1001, 80, oracle.ACK).Frame()}},
		{bpfgen.ReasonICMPErrorFlow, Dropped, [][]byte{v4().ICMP(3, 3, 0).Data(quoted).Frame()}},
	} {
		r := bpfgen.Reasons[x.reason]
		c.forget()
		w.sendFrames(client, false, x.frames...)
		f := c.expect(r.Name, func(f Flow) bool { return f.Reason == r.Name })
		if f.Verdict != x.verdict || f.Sentence != r.Sentence || f.Mend != r.Mend || f.Direction != "from_pod" ||
			f.Hook.Name() != "shop/pod-1" || f.Event != Stopped || f.SourceMAC == "" {
			t.Errorf("%s: told as %+v", r.Name, f)
		}
	}
	// As between an interface's first packet and its entry.
	c.forget()
	w.check(w.n.dp.Endpoints.Delete([]uint32{client.ID}))
	w.sendFrames(client, false, v4().UDP(1, 2).Frame())
	c.expect("no_endpoint", func(f Flow) bool { return f.Reason == "no_endpoint" && f.Source.Address == client.IP4 })
	w.check(w.n.dp.Endpoints.Put([]uint32{client.ID}, []datapath.EndpointSlot{datapath.SlotOf(client)}))

	var last []Flow
	w.check(w.n.Watch(t.Context(), WatchOptions{Last: 16, Once: true}, func(f Flow) error {
		if f.Source.Address == client.IP4 { // not what the pod's kernel says of itself meanwhile
			last = append(last, f)
		}
		return nil
	}))
	last = last[max(0, len(last)-3):]
	if len(last) != 3 || last[2].Reason != "no_endpoint" || last[1].Reason != "icmp_error_flow" || last[0].Reason != "midstream_nat" {
		t.Errorf("the last three are %+v", last)
	}
}

// Pods on one parent link: what passes their own hook by, and what is no pod.
func TestDropsAtTheParentLinkAreTold(t *testing.T) {
	w := newWorld(t)
	w.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up")
	ns := w.name + "-p1"
	w.namespace(ns)
	w.run("ip link add link up0 name eth0 netns %s type macvlan mode bridge && ip -n %s link set eth0 up && ip -n %s addr add 10.9.0.1/24 dev eth0", ns, ns, ns)
	pod := w.endpoint(1, ns, state.PathBoth)
	w.open()
	c := w.watch(WatchOptions{})
	outside := netip.MustParseAddr("10.9.0.200")
	frame := func(mac net.HardwareAddr) []byte {
		return dptest.Eth([6]byte(mac), [6]byte{2, 1, 1, 1, 1, 1}).IP(pod.IP4, outside).UDP(1, 2).Frame()
	}
	w.sendFrames(pod, true, frame(pod.MAC))
	f := c.expect("hook_bypassed", func(f Flow) bool { return f.Reason == "hook_bypassed" })
	if f.Direction != "parent" || f.Hook.Name() != "shop/pod-1" || f.Source.Name() != "shop/pod-1" || f.Destination.Address != outside {
		t.Errorf("told as %+v", f)
	}
	w.run("ip link add link up0 name eth1 netns %s type macvlan mode bridge && ip -n %s link set eth1 up", ns, ns)
	second := pod
	w.check(netns.Do(pod.Netns, func() error {
		l, err := net.InterfaceByName("eth1")
		if err == nil {
			second.PodIndex, second.MAC = l.Index, l.HardwareAddr
		}
		return err
	}))
	w.sendFrames(second, false, frame(second.MAC))
	c.expect("unknown_child", func(f Flow) bool { return f.Reason == "unknown_child" && f.SourceMAC == second.MAC.String() })
}

func TestSeveralWatchAtOnceAndOneTooMany(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathBoth), w.veth(2, state.PathBoth)
	w.serve(server)
	w.open()
	var all []*watcher
	for range bpfgen.EventReaders {
		all = append(all, w.watch(WatchOptions{}))
	}
	if err := w.n.Watch(t.Context(), WatchOptions{}, nil); !errors.Is(err, datapath.ErrTooManyReaders) {
		t.Fatalf("one too many: %v", err)
	}
	w.check(talk(client, "tcp", netip.AddrPortFrom(server.IP4, serverPort)))
	for _, c := range all {
		c.expect("opened", func(f Flow) bool { return f.Event == Opened })
	}
	// One that was killed did not give its place back: its lease is all that ends.
	all[0].end()
	r, err := w.n.dp.ReadEvents(1)
	w.check(err)
	if err := w.n.Watch(t.Context(), WatchOptions{}, nil); !errors.Is(err, datapath.ErrTooManyReaders) {
		t.Fatalf("one too many: %v", err)
	}
	w.check(r.Close())
	late := w.watch(WatchOptions{})
	w.check(talk(client, "tcp", netip.AddrPortFrom(server.IP4, serverPort)))
	late.expect("opened", func(f Flow) bool { return f.Event == Opened })
}

func TestNobodyWatchesNothingIsTold(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathBoth), w.veth(2, state.PathBoth)
	w.serve(server)
	w.open()
	c := w.watch(WatchOptions{})
	c.end()
	if n := w.readers(); n != 0 {
		t.Fatalf("%d places are taken after the end", n)
	}
	before, err := w.n.dp.EventTotals()
	w.check(err)
	w.check(talk(client, "tcp", netip.AddrPortFrom(server.IP4, serverPort)))
	after, err := w.n.dp.EventTotals()
	w.check(err)
	if before != after {
		t.Errorf("the programs told %+v, then %+v", before, after)
	}
}

func TestAFloodIsHeldBackAndCounted(t *testing.T) {
	w := newWorld(t)
	client := w.veth(1, state.PathBoth)
	w.veth(2, state.PathBoth)
	w.open()
	c := w.watch(WatchOptions{})
	frame := dptest.Eth([6]byte{2, 9, 9, 9, 9, 9}, [6]byte(client.NodeMAC)).IP(client.IP4, w.pods[2].IP4).UDP(1, 2).Frame()
	flood := make([][]byte, 3*bpfgen.EventsPerEndpoint)
	for i := range flood {
		flood[i] = frame
	}
	deadline := time.Now().Add(patience)
	for {
		w.sendFrames(client, false, flood...)
		c.mu.Lock()
		told, notes := len(c.flows), len(c.notes)
		c.mu.Unlock()
		if told > 0 && notes > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("told %d, notes %d", told, notes)
		}
	}
	totals, err := w.n.dp.EventTotals()
	w.check(err)
	if totals.Limited == 0 {
		t.Errorf("counted: %+v", totals)
	}
}

func TestSamplingKeepsAFlowWholeAndEveryDrop(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathTC), w.veth(2, state.PathTC)
	w.serve(server)
	w.open()
	all, some := w.watch(WatchOptions{}), w.watch(WatchOptions{Sample: 4})
	const flows = 40
	for range flows {
		w.check(talk(client, "tcp", netip.AddrPortFrom(server.IP4, serverPort)))
	}
	w.sendFrames(client, false, dptest.Eth([6]byte{2, 9, 9, 9, 9, 9}, [6]byte(client.NodeMAC)).IP(client.IP4, server.IP4).UDP(1, 2).Frame())
	dropped := func(f Flow) bool { return f.Verdict == Dropped }
	all.expect("the drop", dropped)
	some.expect("the drop", dropped)
	eventually(t, "all flows are told", func() bool { return all.count() == 2*flows+1 })
	// Both are told in order, and each at a time of its own: with the next drop, the sample has had all before it.
	w.sendFrames(client, false, dptest.Eth([6]byte{2, 9, 9, 9, 9, 9}, [6]byte(client.NodeMAC)).IP(client.IP4, server.IP4).UDP(1, 2).Frame())
	eventually(t, "the drop after all flows", func() bool {
		some.mu.Lock()
		defer some.mu.Unlock()
		drops := 0
		for _, f := range some.flows {
			if dropped(f) {
				drops++
			}
		}
		return drops == 2
	})
	some.mu.Lock()
	defer some.mu.Unlock()
	ports := map[uint16]int{}
	for _, f := range some.flows {
		if f.Verdict == Forwarded {
			ports[f.Source.Port]++
		}
	}
	if len(ports) == 0 || len(ports) > flows*3/4 {
		t.Errorf("%d of %d flows were told", len(ports), flows)
	}
	for port, n := range ports {
		if n != 2 {
			t.Errorf("the flow from port %d was told %d times, not when it opened and when it closed", port, n)
		}
	}
}

func TestAResetEndsAWatchWithASentence(t *testing.T) {
	w := newWorld(t)
	w.veth(1, state.PathBoth)
	w.open()
	done := make(chan error, 1)
	go func() { done <- w.n.Watch(t.Context(), WatchOptions{}, func(Flow) error { return nil }) }()
	eventually(t, "the watcher has its place", func() bool { return w.readers() == 1 })
	w.do(func(e *engine.Engine) error { return e.Reset() })
	select {
	case err := <-done:
		if !errors.Is(err, ErrReset) {
			t.Errorf("it ended with %v", err)
		}
	case <-time.After(patience):
		t.Fatal("it goes on")
	}
}

// An agent that comes back with other programs replaces them in place.
func TestAnUpgradeDoesNotDisturbAWatch(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathBoth), w.veth(2, state.PathBoth)
	w.serve(server)
	w.open()
	c := w.watch(WatchOptions{})
	meta, err := w.n.dp.GetMeta()
	w.check(err)
	meta.Build = [32]byte{1}
	w.check(w.n.dp.PutMeta(meta))
	if a, err := w.n.Why("pod-1", "10.9.0.2:8080"); err != nil || len(a[0].Warnings) != 1 {
		t.Errorf("of another build's programs, why says %+v (%v)", a, err)
	}
	w.veth(3, state.PathBoth)
	if current, err := w.n.dp.Current(); err != nil || !current {
		t.Fatalf("the programs were not replaced (%v)", err)
	}
	w.check(talk(client, "tcp", netip.AddrPortFrom(server.IP4, serverPort)))
	c.expect("opened", func(f Flow) bool {
		return f.Event == Opened && f.Destination.Name() == "shop/pod-2" && f.Protocol == "tcp"
	})
}
