// SPDX-License-Identifier: Apache-2.0

package lab

// Services in the shape of kube-proxy's nftables mode (Kubernetes 1.34,
// pkg/proxy/nftables): one verdict map leads from address, protocol and port to
// the Service's chain, whatever their number.

import (
	"bytes"
	"fmt"
)

const nftBase = `
table %[1]s kube-proxy {
	comment "rules for kube-proxy"
	map service-ips { type %[2]s . inet_proto . inet_service : verdict; comment "ClusterIP, ExternalIP and LoadBalancer IP traffic"; }
	map no-endpoint-services { type %[2]s . inet_proto . inet_service : verdict; comment "vmap to drop or reject packets to services with no endpoints"; }
	chain filter-prerouting { type filter hook prerouting priority -110; }
	chain filter-input { type filter hook input priority -110; ct state new jump service-endpoints-check; }
	chain filter-forward { type filter hook forward priority -110; ct state new jump service-endpoints-check; }
	chain filter-output { type filter hook output priority -110; ct state new jump service-endpoints-check; }
	chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
	chain nat-output { type nat hook output priority -100; jump services; }
	chain nat-postrouting { type nat hook postrouting priority 100; jump masquerading; }
	chain service-endpoints-check { %[1]s daddr . meta l4proto . th dport vmap @no-endpoint-services; }
	chain reject-chain { reject; }
	chain services { %[1]s daddr . meta l4proto . th dport vmap @service-ips; }
	chain mark-for-masquerade { mark set mark or 0x4000; }
	chain masquerading { mark and 0x4000 == 0 return; mark set mark xor 0x4000; masquerade fully-random; }
}
`

func (r ruleset) table() (family, addrType string) {
	if r.v6 {
		return "ip6", "ipv6_addr"
	}
	return "ip", "ipv4_addr"
}

// nft is the input of nft -f: one transaction. Chains come before the elements
// that lead to them.
func (r ruleset) nft(services []Service) []byte {
	var b, served, refused bytes.Buffer
	family, addrType := r.table()
	if r.first {
		fmt.Fprintf(&b, nftBase, family, addrType)
	}
	fmt.Fprintf(&b, "table %s kube-proxy {\n", family)
	for _, s := range services {
		key := fmt.Sprintf("%s . %s . %d", s.VIP, s.Protocol, s.Port)
		if len(s.Backends) == 0 {
			fmt.Fprintf(&refused, "%s : goto reject-chain,\n", key)
			continue
		}
		r.nftService(&b, family, s)
		fmt.Fprintf(&served, "%s : goto service-%s,\n", key, id(s.String()))
	}
	b.WriteString("}\n")
	for name, elements := range map[string]*bytes.Buffer{"service-ips": &served, "no-endpoint-services": &refused} {
		if elements.Len() > 0 {
			fmt.Fprintf(&b, "add element %s kube-proxy %s {\n%s}\n", family, name, elements)
		}
	}
	return b.Bytes()
}

func (r ruleset) nftService(b *bytes.Buffer, family string, s Service) {
	name := s.String()
	for _, be := range s.Backends {
		fmt.Fprintf(b, "chain endpoint-%s {\n\t%s saddr %s jump mark-for-masquerade\n\tmeta l4proto %s dnat to %s\n}\n",
			id(name, be.String()), family, be.Addr(), s.Protocol, be)
	}
	from := fmt.Sprintf("%s saddr != %s ", family, r.podCIDR)
	if r.masqueradeAll {
		from = ""
	}
	fmt.Fprintf(b, "chain service-%s {\n\t%s daddr %s %s dport %d %sjump mark-for-masquerade\n",
		id(name), family, s.VIP, s.Protocol, s.Port, from)
	defer b.WriteString("}\n")
	if len(s.Backends) == 1 {
		// kube-proxy writes a map of one element here. Each such map makes the
		// kernel search all others for a free name: minutes at 100,000.
		fmt.Fprintf(b, "\tgoto endpoint-%s\n", id(name, s.Backends[0].String()))
		return
	}
	fmt.Fprintf(b, "\tnumgen random mod %d vmap {", len(s.Backends))
	for i, be := range s.Backends {
		fmt.Fprintf(b, " %d : goto endpoint-%s,", i, id(name, be.String()))
	}
	b.WriteString(" }\n")
}
