// SPDX-License-Identifier: Apache-2.0

package lab

// Services in the shape of kube-proxy's iptables mode (Kubernetes 1.34,
// pkg/proxy/iptables): KUBE-SERVICES is scanned from the top, KUBE-SVC-x picks
// a KUBE-SEP-y by chance, and that translates.

import (
	"bytes"
	"fmt"
	"net/netip"
)

func (r ruleset) iptablesRestore(by ServiceBy) string {
	tool := "iptables"
	if r.v6 {
		tool = "ip6tables"
	}
	if by == IptablesLegacy {
		return tool + "-legacy-restore"
	}
	return tool + "-nft-restore"
}

// nodePorts is KUBE-SERVICES' last rule, whatever is added later.
const nodePorts = `KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS` + "\n"

const iptablesFilterBase = `*filter
:KUBE-NODEPORTS - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`

const iptablesNATBase = `:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
`

// iptables is the input of iptables-restore --noflush: a chain that is declared
// is emptied, others keep their rules.
func (r ruleset) iptables(services []Service) []byte {
	var b bytes.Buffer
	if r.first {
		b.WriteString(iptablesFilterBase)
	}
	b.WriteString("*filter\n")
	for _, s := range services {
		if len(s.Backends) == 0 {
			fmt.Fprintf(&b, "-A KUBE-SERVICES -m comment --comment \"%s has no endpoints\" %s -j REJECT\n", s, s.match())
		}
	}
	b.WriteString("COMMIT\n*nat\n")
	if r.first {
		b.WriteString(iptablesNATBase)
	} else {
		b.WriteString("-D " + nodePorts)
	}
	for _, s := range services {
		if len(s.Backends) > 0 {
			r.iptablesService(&b, s)
		}
	}
	b.WriteString("-A " + nodePorts + "COMMIT\n")
	return b.Bytes()
}

func (r ruleset) iptablesService(b *bytes.Buffer, s Service) {
	name, match := s.String(), s.match()
	svc := "KUBE-SVC-" + id(name)
	fmt.Fprintf(b, ":%s - [0:0]\n", svc)
	fmt.Fprintf(b, "-A KUBE-SERVICES -m comment --comment \"%s cluster IP\" %s -j %s\n", name, match, svc)
	from := "! -s " + r.podCIDR.String() + " "
	if r.masqueradeAll {
		from = ""
	}
	fmt.Fprintf(b, "-A %s -m comment --comment \"%s cluster IP\" %s%s -j KUBE-MARK-MASQ\n", svc, name, from, match)
	for i, be := range s.Backends {
		sep := "KUBE-SEP-" + id(name, be.String())
		fmt.Fprintf(b, ":%s - [0:0]\n", sep)
		chance := ""
		if left := len(s.Backends) - i; left > 1 {
			chance = fmt.Sprintf("-m statistic --mode random --probability %.10f ", 1/float64(left))
		}
		fmt.Fprintf(b, "-A %s -m comment --comment \"%s -> %s\" %s-j %s\n", svc, name, be, chance, sep)
		fmt.Fprintf(b, "-A %s -m comment --comment %q -s %s -j KUBE-MARK-MASQ\n", sep, name, single(be.Addr()))
		fmt.Fprintf(b, "-A %s -m comment --comment %q -p %s -m %s -j DNAT --to-destination %s\n", sep, name, s.Protocol, s.Protocol, be)
	}
}

func (s Service) match() string {
	return fmt.Sprintf("-p %s -m %s -d %s --dport %d", s.Protocol, s.Protocol, single(s.VIP), s.Port)
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
