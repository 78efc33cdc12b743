// SPDX-License-Identifier: Apache-2.0

// Package state is the desired state of one node as plain tables: Services
// with their backends, and endpoints (the pods' interfaces). It imports
// nothing of ours; everything else speaks in its types.
package state

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
)

// Protocol is a transport protocol by its IANA number.
type Protocol uint8

const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprintf("protocol %d", uint8(p))
}

// MarshalText is the name of p, for JSON.
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText is the reverse of MarshalText.
func (p *Protocol) UnmarshalText(b []byte) error {
	switch string(b) {
	case "tcp":
		*p = TCP
	case "udp":
		*p = UDP
	case "sctp":
		*p = SCTP
	default:
		return fmt.Errorf("protocol %q is none of tcp, udp, sctp", b)
	}
	return nil
}

// Owner says who wants an object; pruning touches only the owner's own. The
// numbers are those of bpf/types.h.
type Owner uint8

const (
	OwnerNone Owner = iota
	OwnerCLI
	OwnerCNI
	OwnerKubernetes
)

func (o Owner) String() string {
	switch o {
	case OwnerCLI:
		return "cli"
	case OwnerCNI:
		return "cni"
	case OwnerKubernetes:
		return "kubernetes"
	}
	return "none"
}

// MarshalText is the name of o, for JSON.
func (o Owner) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText is the reverse of MarshalText.
func (o *Owner) UnmarshalText(b []byte) error {
	for _, v := range []Owner{OwnerNone, OwnerCLI, OwnerCNI, OwnerKubernetes} {
		if v.String() == string(b) {
			*o = v
			return nil
		}
	}
	return fmt.Errorf("owner %q is none of cli, cni, kubernetes", b)
}

// ServicePath says where an endpoint's Services are translated.
type ServicePath string

const (
	PathBoth   ServicePath = "both"   // at the socket, and by packet for what has no socket here
	PathSocket ServicePath = "socket" // at connect() and sendmsg() only
	PathTC     ServicePath = "tc"     // by packet only
	PathNone   ServicePath = "none"
)

// Placement is where an endpoint's programs sit.
type Placement string

const (
	HostEnd Placement = "host" // on the node's end of a veth or netkit pair
	InPod   Placement = "pod"  // inside the pod, directions swapped
)

// How an endpoint's programs are held at their interface.
const (
	AttachTCX    = "tcx"
	AttachClsact = "clsact"
	AttachNetkit = "netkit" // the device's own hooks
)

// Endpoint is one interface of one pod. Everything up to Owner is in the
// tables; the rest only in the store.
type Endpoint struct {
	ID          uint32
	Generation  uint32
	IfIndex     int // of the interface that carries the programs
	Parent      int // ifindex of the parent link of an in-pod kind, else 0
	MTU         int // bytes, without the link header: the longest packet that may be handed to it
	LinkMTU     int // of the interface inside the pod; less than MTU where pods of a node have a local MTU
	NetnsCookie uint64
	IP4, IP6    netip.Addr       // invalid when it has none
	MAC         net.HardwareAddr // the pod's interface
	NodeMAC     net.HardwareAddr // what the pod sees as its gateway; zeros when unknown
	Router6     netip.Addr       `json:",omitzero"` // its next hop to everywhere, where that is link-local; told at ADD alone
	Placement   Placement
	NodeRoutes  bool // what the pod sends meets the node's stack, and none of its ingresses, as by ipvlan in l3 mode
	ServicePath ServicePath
	Owner       Owner

	Netns    string // path of the pod's network namespace
	IfName   string // inside the pod
	HostIf   string // name of the host's end; "" in-pod
	PodIndex int    // ifindex inside the pod
	Labels   map[string]string
	Ports    []NamedPort `json:",omitempty"`
	// Masquerade lets it wear the node's address; nil: it does not.
	Masquerade *Masquerade `json:",omitempty"`
	Pod        PodRef      `json:",omitzero"` // whose interface it is, when Kubernetes told
	// Attach is one of AttachTCX and its like; Qdisc says that the clsact qdisc was made by us.
	Attach string
	Qdisc  bool `json:",omitempty"`
}

// PodRef names a pod of Kubernetes. The UID tells it from others that had or
// will have its name.
type PodRef struct {
	Namespace, Name, UID string
}

// Addrs are the endpoint's addresses, IPv4 first.
func (e Endpoint) Addrs() []netip.Addr {
	var out []netip.Addr
	for _, a := range []netip.Addr{e.IP4, e.IP6} {
		if a.IsValid() {
			out = append(out, a)
		}
	}
	return out
}

// Masquerade is how a pod appears to the outside: under its node's address.
type Masquerade struct {
	// Inside are destinations towards which it keeps its own.
	Inside []netip.Prefix `json:",omitempty"`
}

// NamedPort is a container's port that has a name.
type NamedPort struct {
	Name     string
	Protocol Protocol
	Number   uint16
}

// Compare orders ports by name, protocol and number.
func (p NamedPort) Compare(q NamedPort) int {
	return cmp.Or(cmp.Compare(p.Name, q.Name), cmp.Compare(p.Protocol, q.Protocol), cmp.Compare(p.Number, q.Number))
}

// Counter counts packets and bytes.
type Counter struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// Network is p without what lies behind its length, and as IPv4 where it is a part of that which is written as IPv6
// (::ffff:192.0.2.0/120), as the tables have it.
func Network(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked()
}
