// SPDX-License-Identifier: Apache-2.0

// Package lab builds a small world on one machine: nodes and pods in network
// namespaces, and Services between them, by mustang or by the kernel's own
// means. The demo, the bench and the tests all stand on it.
//
// The lab treats mustang as a user would: it runs the mustang binary and
// never imports internal/. Everything it makes carries the lab's name, so that
// a later run can remove what a killed one left behind.
package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
)

// Mode is the way a pod is connected to its node.
type Mode string

const (
	Veth    Mode = "veth"    // routed veth pair, permanent neighbour
	Bridge  Mode = "bridge"  // veth pair whose host end is a bridge port
	Macvlan Mode = "macvlan" // macvlan in bridge mode on the node's uplink

	IPVlan     Mode = "ipvlan"      // ipvlan l2 on the node's uplink
	IPVlanL3   Mode = "ipvlan-l3"   // the same, routed by the node
	Netkit     Mode = "netkit"      // routed netkit pair
	NetkitL3   Mode = "netkit-l3"   // the same without link addresses
	HostDevice Mode = "host-device" // a NIC of its own for each pod, on a switch outside
)

// siblings says whether pods are sub-interfaces of the node's uplink.
func (m Mode) siblings() bool { return m == Macvlan || m == IPVlan || m == IPVlanL3 }

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

// Modes and ServiceBys list what there is, for flags and tests.
var (
	Modes      = []Mode{Veth, Bridge, Macvlan, IPVlan, IPVlanL3, Netkit, NetkitL3, HostDevice}
	ServiceBys = []ServiceBy{NoServices, IptablesNFT, IptablesLegacy, NFT, MustangTC, MustangSocket, Mustang}
)

// Config describes one lab.
type Config struct {
	Name     string    // 1 to 6 lower-case letters and digits; prefix of every namespace
	Nodes    int       // how many; 0 means 1. Two are joined by a wire, more by a switch
	Mode     Mode      // how pods are connected
	Services ServiceBy // anything but a mustang value makes plain pods; "" means NoServices
	BridgeNF bool      // bridge mode: bridge-nf-call-iptables and -ip6tables
	MTU      int       // bytes; 0 means 1500
	LocalMTU string    // between pods: auto, off or bytes, as `mustang pod add --local-mtu`; "" means auto
	BigTCP   int       // bytes of the largest bundle, which the wire takes too; 0 means none
	// LocalCIDRs are where pods have a local MTU to; nil means the pods' own.
	LocalCIDRs []netip.Prefix
	Binary     string // the mustang binary; "" means this executable
	CgroupRoot string // whose sockets mustang serves, several nodes each by a group of its own beside it; "" means the machine's cgroup v2 root for all

	ownCgroups bool // of each node
}

// Service is one virtual address and port with its backends.
type Service struct {
	VIP      netip.Addr
	Port     uint16
	Protocol string // "tcp", "udp" or "sctp"
	Backends []netip.AddrPort
}

// No dash: "mst-NAME-" must not be the beginning of another lab's names.
var nameOK = regexp.MustCompile(`^[a-z0-9]{1,6}$`)

// configError is a lab that nobody can build: the caller's mistake, so the tool exits with
// the status of wrong usage.
type configError struct{ error }

func (configError) ExitCode() int   { return 2 }
func (e configError) Unwrap() error { return e.error }

func (c Config) validate() error {
	if !nameOK.MatchString(c.Name) {
		return fmt.Errorf("lab name %q is not usable: use 1 to 6 lower-case letters and digits", c.Name)
	}
	if !contains(Modes, c.Mode) {
		return fmt.Errorf("mode %q is unknown: use one of %v", c.Mode, Modes)
	}
	if !contains(ServiceBys, c.Services) {
		return fmt.Errorf("services %q is unknown: use one of %v", c.Services, ServiceBys)
	}
	if c.Nodes < 1 || c.Nodes > MaxNodes {
		return fmt.Errorf("%d nodes are out of range: use 1 to %d", c.Nodes, MaxNodes)
	}
	if c.Nodes > 1 && c.Mode == HostDevice {
		return errors.New("with host devices the node is not in the pods' way: a lab of them has one node")
	}
	if c.MTU < 1280 || c.MTU > 65535 {
		return fmt.Errorf("MTU %d is out of range: use 1280 to 65535", c.MTU)
	}
	if err := c.validateSizes(); err != nil {
		return err
	}
	if c.Mode == Bridge && c.Services.kernel() && !c.BridgeNF {
		return errors.New("services by the kernel on a bridge need BridgeNF: else replies between its ports are not translated back")
	}
	if c.Mode == HostDevice && c.Services.kernel() {
		return errors.New("services by the kernel need the node in the pods' way, and with host devices it is not: use mustang's")
	}
	return nil
}

func contains[T comparable](all []T, one T) bool {
	for _, x := range all {
		if x == one {
			return true
		}
	}
	return false
}

// kernel reports whether the kernel's own firewall implements the Services.
func (s ServiceBy) kernel() bool {
	return s == IptablesNFT || s == IptablesLegacy || s == NFT
}

// servicePath is the value of `mustang pod add --service-path`, or "" when
// pods are plain.
func (s ServiceBy) servicePath() string {
	return map[ServiceBy]string{MustangTC: "tc", MustangSocket: "socket", Mustang: "both"}[s]
}

func (s Service) validate() error {
	if s.Protocol != "tcp" && s.Protocol != "udp" && s.Protocol != "sctp" {
		return fmt.Errorf("service %s: protocol %q is unknown: use tcp, udp or sctp", s, s.Protocol)
	}
	if !s.VIP.IsValid() || s.Port == 0 {
		return fmt.Errorf("service %s: address or port is missing", s)
	}
	for _, b := range s.Backends {
		if b.Addr().Is4() != s.VIP.Is4() || b.Port() == 0 {
			return fmt.Errorf("service %s: backend %s needs a port and the service's address family", s, b)
		}
	}
	return nil
}

// String is the service as ADDRESS:PORT/PROTOCOL.
func (s Service) String() string {
	return netip.AddrPortFrom(s.VIP, s.Port).String() + "/" + s.Protocol
}
