// SPDX-License-Identifier: Apache-2.0

package report

// Article A's table: iperf3, one flow, Gbit/s at the sender, kernel 4.18.
// Absolute figures do not carry over; their ratios are what is printed.

// seedRow is one line of the article's table; 0 means it has no figure.
type seedRow struct {
	name             string
	podIP, clusterIP float64
}

var (
	seedVeth        = seedRow{"veth", 66.8, 66.0}
	seedBridge      = seedRow{"bridge, nf on", 65.6, 61.5}
	seedBridgeNFOff = seedRow{"bridge, nf off", 77.1, 0}
	seedMacvlan     = seedRow{"macvlan", 83.6, 61.9}
	seedIpvlanEBPF  = seedRow{"ipvlan + eBPF", 83.6, 78.8}
	seedVethEBPF    = seedRow{"veth + eBPF", 74.4, 74.4}
)

// seedFor returns the article's line for a subject. The article has no macvlan
// with eBPF; ipvlan with eBPF, equal to it by pod IP, stands beside it and the
// table says so.
func seedFor(s Subject) (seedRow, bool) {
	if s.Tune != "" {
		return seedRow{}, false // nothing of the kind in the article
	}
	if IsMustang(s.By) {
		switch s.Mode {
		case Veth:
			return seedVethEBPF, true
		case Macvlan:
			return seedIpvlanEBPF, true
		}
		return seedRow{}, false
	}
	if s.By == "nft" {
		return seedRow{}, false // the article measured iptables
	}
	switch s.Mode {
	case Veth:
		return seedVeth, true
	case Bridge:
		return seedBridge, true
	case BridgeNFOff:
		return seedBridgeNFOff, true
	case Macvlan:
		return seedMacvlan, true
	}
	return seedRow{}, false
}

// byLoss is the article's ClusterIP ÷ pod IP, 0 for none.
func (r seedRow) byLoss() float64 {
	if r.podIP == 0 {
		return 0
	}
	return r.clusterIP / r.podIP
}

// overVeth is the article's figure over its plain veth by pod IP, 0 for none.
func (r seedRow) overVeth(via string) float64 {
	if via == ClusterIP {
		return r.clusterIP / seedVeth.podIP
	}
	return r.podIP / seedVeth.podIP
}

// IsMustang says whether Services are mustang's, by the name of who does them.
func IsMustang(by string) bool {
	return by == "mustang" || by == "mustang-tc" || by == "mustang-socket"
}
