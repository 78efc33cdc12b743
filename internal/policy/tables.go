// SPDX-License-Identifier: Apache-2.0

package policy

import "net/netip"

// Limits are the numbers of entries that the tables take.
type Limits struct{ Peers, Ports, Identities, Prefixes int }

// Identities that are no hashes; bpf/types.h has the same numbers.
const (
	Anybody uint64 = 0
	AnyPod  uint64 = 1
	Node    uint64 = 2
	first   uint64 = 16
)

// Flags of a set; bpf/types.h has the same numbers.
const (
	setAnybody uint16 = 1 << iota
	setAnyPod
	setPods
	setPrefixes
	setIncomplete
	setUnknown
)

// Identity is who has an address. 0 is nothing that a rule asks for.
type Identity struct{ Pod, Prefix uint64 }

// PeerKey is an identity as a policy set's peer.
type PeerKey struct{ Set, Identity uint64 }

// PeerRules is what a set allows a peer: everything by Rule, or the list Ports,
// which has port prefixes of the Lengths whose bits are set.
type PeerRules struct {
	Ports   uint64
	Rule    uint32
	Lengths uint32
}

// PortKey is one port prefix of a list.
type PortKey struct {
	Ports    uint64
	Port     uint16
	Protocol uint8
	Length   uint8
}

// Isolation is the policy sets of an endpoint; 0: not isolated.
type Isolation struct {
	Ingress, Egress           uint64
	IngressFlags, EgressFlags uint16
}

// Tables is what a node's tables hold about policy.
type Tables struct {
	Ports      map[PortKey]uint32
	Peers      map[PeerKey]PeerRules
	Identities map[netip.Addr]Identity
	Prefixes   map[netip.Prefix]uint64
	Endpoints  map[uint32]Isolation
}

func newTables() Tables {
	return Tables{
		Ports: map[PortKey]uint32{}, Peers: map[PeerKey]PeerRules{}, Identities: map[netip.Addr]Identity{},
		Prefixes: map[netip.Prefix]uint64{}, Endpoints: map[uint32]Isolation{},
	}
}

// Change is what tables must become. Its parts are written in an order that
// leaves every packet a verdict of the old state or of the new one, or a
// stricter one: package reconcile has it.
type Change struct {
	// Full says that Put is everything there is to be: what else the tables
	// hold goes, and Gone is empty.
	Full bool
	Put  Tables
	Gone Gone
	// Early are which pods have addresses that are in Late or Gone, before any of Put.Endpoints:
	// a set that is new there may ask what the identity from before does not tell.
	Early map[netip.Addr]Identity
	// Late are identities that are written after everything that goes: an
	// address whose own prefix identity ends falls back to its prefix's.
	Late map[netip.Addr]Identity
	// Stricter are the endpoints some of whose established flows may not be
	// allowed any more. Of a full change nobody knows: compare.
	Stricter []uint32
}

// Gone is what is to be deleted.
type Gone struct {
	Ports      []PortKey
	Peers      []PeerKey
	Identities []netip.Addr
	Prefixes   []netip.Prefix
	Endpoints  []uint32
}

// Empty says that nothing changes.
func (c *Change) Empty() bool {
	return !c.Full && len(c.Put.Ports) == 0 && len(c.Put.Peers) == 0 && len(c.Put.Identities) == 0 &&
		len(c.Put.Prefixes) == 0 && len(c.Put.Endpoints) == 0 && len(c.Gone.Ports) == 0 && len(c.Gone.Peers) == 0 &&
		len(c.Gone.Identities) == 0 && len(c.Gone.Prefixes) == 0 && len(c.Gone.Endpoints) == 0 && len(c.Late) == 0 && len(c.Stricter) == 0
}
