// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/dptest"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// From Services as their owner wants them, through choice, tables and programs,
// to packets: generated clusters, and an evaluator that knows nothing of how it
// is done.

// kernelTable is a real table.
type kernelTable[K, V comparable] struct{ m *ebpf.Map }

func (t kernelTable[K, V]) Put(keys []K, values []V) error {
	for i, k := range keys {
		if err := t.m.Put(k, values[i]); err != nil {
			return err
		}
	}
	return nil
}

func (t kernelTable[K, V]) Delete(keys []K) error {
	for _, k := range keys {
		if err := t.m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return nil
}

func (t kernelTable[K, V]) All() (map[K]V, error) {
	out := make(map[K]V)
	var k K
	var v V
	it := t.m.Iterate()
	for it.Next(&k, &v) {
		out[k] = v
	}
	return out, it.Err()
}

// frontendTable is the real table of frontends, whose ports are told to the edge.
type frontendTable struct {
	kernelTable[datapath.FrontendKey, datapath.Frontend]
	c *cluster
}

func (t frontendTable) Put(keys []datapath.FrontendKey, values []datapath.Frontend) error {
	for _, k := range keys {
		t.c.edge.TellPort(t.c.t, datapath.Port(k.Port))
	}
	return t.kernelTable.Put(keys, values)
}

// cluster is one generated Service on a node with pods 1 to 3 (3 is a client),
// a client outside, and backends on other nodes.
type cluster struct {
	t    *testing.T
	edge *dptest.Edge
	r    *rand.Rand
	v6   bool
	s    state.Service
}

var zone = service.Node{Name: "n1", Zone: "a"}

func (c *cluster) port(a netip.Addr, p uint16) netip.AddrPort { return netip.AddrPortFrom(a, p) }

func (c *cluster) coin(of int) bool { return c.r.IntN(of) == 0 }

func (c *cluster) generate() {
	nodePort := netip.IPv4Unspecified()
	if c.v6 {
		nodePort = netip.IPv6Unspecified()
	}
	port := state.ServicePort{Protocol: state.Protocol([]uint8{oracle.TCP, oracle.UDP}[c.r.IntN(2)]), Frontends: []state.ServiceFrontend{
		{Kind: state.ClusterIP, AddrPort: c.port(dptest.VIP(1, c.v6), 80)}, {Kind: state.NodePort, AddrPort: c.port(nodePort, 30080)},
		{Kind: state.ExternalIP, AddrPort: c.port(dptest.VIP(2, c.v6), 80)}, {Kind: state.LoadBalancer, AddrPort: c.port(dptest.VIP(3, c.v6), 80)},
	}}
	everyHint := c.coin(2)
	for i := range c.r.IntN(5) {
		b := state.ServiceBackend{Local: i < 2, AddrPort: c.port(dptest.External(10+i, c.v6), 8080)}
		if b.Local {
			b.AddrPort = c.port(c.edge.Pods[uint32(1+i)].IP(c.v6), 8080)
		}
		if c.coin(4) && b.Local {
			continue
		}
		b.Ready = c.coin(2)
		b.Serving, b.Terminating = b.Ready || c.coin(2), !b.Ready && c.coin(2)
		if everyHint || c.coin(3) {
			b.ForZones = []string{[]string{"a", "b"}[c.r.IntN(2)]}
		}
		port.Backends = append(port.Backends, b)
	}
	c.s = state.Service{ServiceID: state.ServiceID{Owner: state.OwnerKubernetes, Name: "web"}, Ports: []state.ServicePort{port},
		External: state.TrafficPolicy(c.r.IntN(2)), Internal: state.TrafficPolicy(c.r.IntN(2)), Algorithm: state.Algorithm(c.r.IntN(8) / 7)}
	if c.coin(3) {
		c.s.Affinity = time.Hour
	}
	if c.coin(2) {
		n := 1 + c.r.IntN(2) // the client's own address, or not
		c.s.SourceRanges = []netip.Prefix{netip.PrefixFrom(dptest.External(n, c.v6), dptest.External(n, c.v6).BitLen())}
		if c.coin(2) { // all of a family, the client's or not
			c.s.SourceRanges = append(c.s.SourceRanges, netip.MustParsePrefix([]string{"::/0", "0.0.0.0/0"}[c.r.IntN(2)]))
		}
	}
}

// judge says what must become of a client's first packet: a reason to drop it,
// or one of these backends.
func (c *cluster) judge(kind state.FrontendKind, outside bool, client netip.Addr) (reason string, backends []netip.AddrPort) {
	allows := func(p netip.Prefix) bool { return p.Contains(client) }
	if kind == state.LoadBalancer && len(c.s.SourceRanges) > 0 && !slices.ContainsFunc(c.s.SourceRanges, allows) {
		return "source_range", nil
	}
	all := c.s.Ports[0].Backends
	local := kind == state.ClusterIP && c.s.Internal == state.PolicyLocal || kind != state.ClusterIP && outside && c.s.External == state.PolicyLocal
	var ready, last, hinted []netip.AddrPort
	hints, any := true, false
	for _, b := range all {
		usable := b.Ready || b.Serving && b.Terminating
		any = any || usable
		if !usable || local && !b.Local {
			continue
		}
		if !b.Ready {
			last = append(last, b.AddrPort)
			continue
		}
		ready = append(ready, b.AddrPort)
		hints = hints && len(b.ForZones) > 0
		if slices.Contains(b.ForZones, zone.Zone) {
			hinted = append(hinted, b.AddrPort)
		}
	}
	switch {
	case !any:
		return "no_backend", nil
	case len(ready) == 0 && len(last) == 0:
		return "no_local_backend", nil
	case len(ready) == 0:
		return "", last
	case !local && hints && len(hinted) > 0:
		return "", hinted
	}
	return "", ready
}

func TestTheOracleAgreesOnGeneratedClusters(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	c := &cluster{t: t, edge: dptest.NewEdge(t, dptest.Options{Sizes: map[string]uint32{"mst_slots_v1": 65536}}, 3), r: rand.New(rand.NewPCG(seed, 1))}
	s, err := LoadServices(ServiceTables{
		Frontends: frontendTable{kernelTable[datapath.FrontendKey, datapath.Frontend]{c.edge.MstServicesV2}, c},
		Slots:     kernelTable[datapath.SlotKey, uint32]{c.edge.MstSlotsV1},
		Backends:  kernelTable[uint32, datapath.Backend]{c.edge.MstBackendsV1},
		Sources:   kernelTable[datapath.SourceKey, uint8]{c.edge.MstSourcesV1},
		Meta:      kernelTable[uint32, datapath.Meta]{c.edge.MstMetaV1},
	})
	if err != nil {
		t.Fatal(err)
	}
	catalog, met := service.NewCatalog(zone, nil, nil), map[string]int{}
	for range 400 {
		c.v6 = !c.v6
		c.generate()
		change := catalog.Plan([]state.Service{c.s}, nil)
		if err := s.Apply(change.Upserts, change.Removes); err != nil {
			t.Fatal(err)
		}
		catalog.Commit(change)
		c.edge.ClearFlows(t)
		for _, f := range c.s.Ports[0].Frontends {
			for _, outside := range []bool{false, true} {
				met[c.try(f, outside)]++
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d: %+v", seed, c.s)
		}
	}
	for _, verdict := range []string{"", "no_backend", "no_local_backend", "source_range"} {
		if met[verdict] < 10 {
			t.Errorf("the verdict %q was met %d times", verdict, met[verdict])
		}
	}
}

// try sends a client's first packet to a frontend. It returns what had to become of it.
func (c *cluster) try(f state.ServiceFrontend, outside bool) string {
	c.t.Helper()
	to := f.AddrPort
	if f.Kind == state.NodePort {
		to = c.port(c.edge.Node(c.v6), to.Port())
	}
	pod, sport := c.edge.Pods[3], uint16(1024+c.r.IntN(50000))
	client, send := pod.IP(c.v6), func(frame []byte) (dptest.Arrival, error) { return c.edge.Send(pod, frame) }
	macs := [2][6]byte{pod.MAC, pod.NodeMAC}
	if outside {
		client, send, macs = dptest.External(1, c.v6), c.edge.Arrive, [2][6]byte{dptest.Router, c.edge.MAC}
	}
	reason, backends := c.judge(f.Kind, outside, client)
	a, err := send(dptest.Eth(macs[0], macs[1]).IP(client, to.Addr()).L4(uint8(c.s.Ports[0].Protocol), sport, to.Port(), oracle.SYN).Payload(8).Frame())
	where := fmt.Sprintf("%v %v, outside %v", f.Kind, to, outside)
	switch {
	case err != nil || a.Dropped != reason:
		c.t.Errorf("%s: %v, %v; want %q of %v", where, a, err, reason, backends)
	case reason == "" && !slices.Contains(backends, a.Tuple().Dst):
		c.t.Errorf("%s: %v; want one of %v", where, a, backends)
	case reason == "":
		keeps := !outside || f.Kind != state.ClusterIP && c.s.External == state.PolicyLocal
		if want := map[bool]netip.Addr{true: client, false: c.edge.Node(c.v6)}[keeps]; a.Tuple().Src.Addr() != want {
			c.t.Errorf("%s: %v; want it from %v", where, a, want)
		}
	}
	return reason
}
