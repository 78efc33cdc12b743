// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/dptest"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/reconcile"
)

// TestAChangeThatSelectsAThousandPods: from the change to the last generation
// in the kernel, on a node with a thousand pods in a cluster of twenty thousand.
func TestAChangeThatSelectsAThousandPods(t *testing.T) {
	const here, cluster, limit = 1000, 20_000, 100 * time.Millisecond
	d := dptest.New(t, dptest.Options{Sizes: map[string]uint32{"mst_identities_v1": 65536}})
	rec := reconcile.NewPolicies(tablesOf(t, d))
	m := policy.New(policy.Limits{Identities: 65536, Prefixes: 65536, Peers: 262144, Ports: 262144})
	for i := range cluster {
		p := policy.Pod{Key: policy.Key{Namespace: fmt.Sprintf("ns%d", i%50), Name: fmt.Sprintf("p%d", i)},
			Labels: map[string]string{"app": fmt.Sprintf("app%d", i%100), "pod": fmt.Sprintf("p%d", i%5000)},
			Addrs:  []netip.Addr{netip.AddrFrom4([4]byte{10, 8, byte(i >> 8), byte(i)}), netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})}}
		if i < here {
			p.Namespace = "ns0"
			id := uint32(i + 1)
			m.SetEndpoint(policy.Endpoint{ID: id, Pod: p.Key, Addrs: p.Addrs})
			check(t, d.MstEndpointsV1.Put(id, datapath.EndpointSlot{Generation: id}))
		}
		m.SetPod(p)
	}
	apply := func() time.Duration {
		start := time.Now()
		_, err := rec.Apply(m.Plan())
		check(t, err)
		return time.Since(start)
	}
	t.Logf("the first plan: %v", apply())
	best := time.Hour
	for i := 0; i < 7 || i < 50 && best > limit; i++ { // a machine that has other work is asked again
		p := policy.Policy{Key: policy.Key{Namespace: "ns0", Name: "p"}, IsolatesIngress: true, IsolatesEgress: i%2 == 0}
		p.Ingress = []policy.Rule{{Peers: []policy.Peer{{Pods: &policy.Selector{{Key: "app", Operator: policy.In, Values: []string{fmt.Sprintf("app%d", i)}}},
			Namespaces: &policy.Selector{}}}}}
		m.SetPolicy(p)
		set := apply()
		slots := 0
		var e datapath.EndpointPolicy
		for id := range uint32(here) {
			check(t, d.MstPoliciesV1.Lookup(id+1, &e))
			if e.Ingress != 0 {
				slots++
			}
		}
		if slots != here {
			t.Fatalf("%d pods are isolated, want %d", slots, here)
		}
		m.DeletePolicy(p.Key)
		gone := apply()
		best = min(best, max(set, gone))
		t.Logf("a policy that selects %d pods: %v, its removal %v", here, set, gone)
	}
	if best > limit {
		t.Errorf("the best of all took %v, the limit is %v", best, limit)
	}
}
