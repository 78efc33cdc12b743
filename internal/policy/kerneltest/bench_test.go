// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/dptest"
	packets "github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/state"
)

// BenchmarkFirstPacket is the whole program on a first packet that is denied,
// because that one leaves no flow and can be sent again: from an address that
// is allowed, to a port that is not, so that every table is asked.
func BenchmarkFirstPacket(b *testing.B) {
	for _, kind := range []string{"no policy", "addresses", "rules", "prefixes"} {
		for _, n := range []int{1, 10_000, 100_000} {
			if kind == "no policy" && n > 1 {
				continue
			}
			b.Run(fmt.Sprintf("%s/%d", kind, n), func(b *testing.B) { firstPacket(b, kind, n) })
		}
	}
}

const peerLimit = 1 << 17

func firstPacket(b *testing.B, kind string, n int) {
	d := dptest.New(b, dptest.Options{Sizes: map[string]uint32{"mst_prefixes_v1": peerLimit}})
	pod := d.AddPod(b, 1)
	m := policy.New(policy.Limits{Identities: 2 * peerLimit, Prefixes: peerLimit, Peers: 2 * peerLimit, Ports: 2 * peerLimit})
	key := policy.Key{Namespace: "ns", Name: "p"}
	m.SetPod(policy.Pod{Key: key, Addrs: []netip.Addr{pod.IP4}})
	m.SetEndpoint(policy.Endpoint{ID: pod.ID, Pod: key, Addrs: []netip.Addr{pod.IP4}})
	if kind != "no policy" {
		m.SetPolicy(manyPeers(key, kind, n))
	}
	_, err := reconcile.NewPolicies(tablesOf(b, d)).Apply(m.Plan())
	check(b, err)
	frame := dptest.Eth(dptest.Router, pod.MAC).IP(benchPeer(n/2), pod.IP4).L4(packets.TCP, 1234, 81, packets.SYN).Frame()
	b.ResetTimer()
	verdict, err := d.Repeat(d.PodPrograms.ToPod, frame, dptest.Context{Endpoint: pod.ID, CameIn: spoofed}, b.N)
	check(b, err)
	if (verdict == dptest.Drop) != (kind != "no policy") {
		b.Fatal(verdict)
	}
}

// benchPeer is peer i: of single addresses one after the other, so that prefixes
// around them do not meet.
func benchPeer(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{100, byte(i >> 14), byte(i >> 6), byte(i << 2)})
}

func manyPeers(key policy.Key, kind string, n int) policy.Policy {
	p := policy.Policy{Key: key, IsolatesIngress: true}
	ports := []policy.Port{{Protocol: state.TCP, First: 80, Last: 80}}
	bits := 32
	if kind == "prefixes" {
		bits = 30
	}
	for i := range n {
		peer := policy.Peer{Block: &policy.Block{CIDR: netip.PrefixFrom(benchPeer(i), bits)}}
		if kind == "rules" || i == 0 {
			p.Ingress = append(p.Ingress, policy.Rule{Ports: ports})
		}
		last := &p.Ingress[len(p.Ingress)-1]
		last.Peers = append(last.Peers, peer)
	}
	return p
}
