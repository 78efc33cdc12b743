// SPDX-License-Identifier: Apache-2.0

// Package lab builds a small world on one machine: nodes and pods in network
// namespaces, and Services between them, by mustang or by the kernel's own
// means. The demo, the bench and the tests all stand on it.
//
// The lab treats mustang as a user would: it runs the mustang binary and
// never imports internal/. Everything it makes carries the lab's name, so that
// a later run can remove what a killed one left behind.
package lab

import "net/netip"

// Mode is the way a pod is connected to its node.
type Mode string

const (
	Veth    Mode = "veth"    // routed veth pair, permanent neighbour
	Bridge  Mode = "bridge"  // veth pair whose host end is a bridge port
	Macvlan Mode = "macvlan" // macvlan in bridge mode on the node's uplink
)

// ServiceBy names what implements Services on a node.
type ServiceBy string

const (
	NoServices     ServiceBy = "none"
	IptablesNFT    ServiceBy = "iptables-nft"    // kube-proxy's chain shape, nf_tables backend
	IptablesLegacy ServiceBy = "iptables-legacy" // the same rules, legacy backend
	NFT            ServiceBy = "nft"             // kube-proxy's nftables shape: a verdict map
	MustangTC      ServiceBy = "mustang-tc"      // NAT at the pod's tc hooks
	MustangSocket  ServiceBy = "mustang-socket"  // rewrite at connect()
	Mustang        ServiceBy = "mustang"         // both, as shipped
)

// Config describes one lab.
type Config struct {
	Name     string    // at most 6 characters; prefix of every namespace and link
	Mode     Mode      // how pods are connected
	Services ServiceBy // anything but a mustang value makes plain pods
	BridgeNF bool      // bridge mode: bridge-nf-call-iptables and -ip6tables
	MTU      int       // bytes; 0 means 1500
	Binary   string    // the mustang binary; "" means this executable
}

// Service is one virtual address and port with its backends.
type Service struct {
	VIP      netip.Addr
	Port     uint16
	Protocol string // "tcp" or "udp"
	Backends []netip.AddrPort
}
