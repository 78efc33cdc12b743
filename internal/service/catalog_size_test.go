// SPDX-License-Identifier: Apache-2.0

package service

import (
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// wide is a Service of many ports at many external addresses.
func wide(name string, ports, addresses int) state.Service {
	s := state.Service{ServiceID: state.ServiceID{Owner: state.OwnerKubernetes, Name: name}, External: state.PolicyLocal}
	for p := range ports {
		port := state.ServicePort{Protocol: state.TCP, Backends: []state.ServiceBackend{be("1 ready")}}
		for a := range addresses {
			addr := netip.AddrFrom4([4]byte{198, 18, byte(a >> 8), byte(a)})
			port.Frontends = append(port.Frontends, state.ServiceFrontend{Kind: state.ExternalIP, AddrPort: netip.AddrPortFrom(addr, uint16(1000+p))})
		}
		s.Ports = append(s.Ports, port)
	}
	return s
}

// A Service may have as many frontends as its ports times its external addresses, and
// another may claim them all, or have them as its cluster IPs. Were each looked for among all
// the others, this would not end.
func TestAServiceOfManyFrontends(t *testing.T) {
	const ports, addresses = 60, 1000
	c, m := NewCatalog(Node{}, nil, nil), tables{}
	first, second := wide("first", ports, addresses), wide("second", ports, addresses)
	m.apply(c, c.Plan([]state.Service{first, second}, nil))
	const all = ports * addresses
	if len(m) != 2*all || len(c.Problems(state.OwnerKubernetes)) != all {
		t.Fatalf("%d bindings are in force, with %d problems; want two of each frontend, and one problem of each", len(m), len(c.Problems(state.OwnerKubernetes)))
	}
	owner := wide("owner", ports, addresses)
	owner.External = state.PolicyCluster
	for i := range owner.Ports {
		for j := range owner.Ports[i].Frontends {
			owner.Ports[i].Frontends[j].Kind = state.ClusterIP
		}
	}
	m.apply(c, c.Plan([]state.Service{owner}, nil))
	if len(m) != all || len(c.Problems(state.OwnerKubernetes)) != 2*all {
		t.Fatalf("%d bindings are in force beside those of cluster IPs, with %d problems", len(m), len(c.Problems(state.OwnerKubernetes)))
	}
	again := NewCatalog(Node{}, m.list(), nil)
	m.apply(again, again.Plan([]state.Service{owner}, nil))
	m.apply(again, again.Plan(nil, []state.ServiceID{owner.ServiceID}))
	if len(m) != 0 {
		t.Fatalf("%d bindings outlive their Service", len(m))
	}
}
