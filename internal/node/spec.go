// SPDX-License-Identifier: Apache-2.0

// Package node joins this node to others: what a list of nodes may say, routes
// to other nodes' pods, the tunnel's device, which devices lead to the wire.
// It acts in the network namespace of the calling thread.
package node

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/state"
)

// Defaults of state.NodeSettings. The port is IANA's (RFC 7348).
const (
	DefaultVNI  = 1
	DefaultPort = 4789
	maxVNI      = 1<<24 - 1
)

// Spec is a node as people write it.
type Spec struct {
	Name     string   `json:"name"`
	Address  []string `json:"addresses"`
	PodCIDRs []string `json:"podCIDRs"`
	Mode     string   `json:"mode,omitempty"` // direct when empty
}

// AutoDevices alone, in place of devices' names, has the links to other nodes found.
const AutoDevices = "auto"

// SettingsSpec is this node's own settings as people write them; what is empty
// keeps its value.
type SettingsSpec struct {
	HostRouting string   `json:"hostRouting,omitempty"`
	Devices     []string `json:"devices,omitempty"` // [auto]: none are named
	VNI         int      `json:"vni,omitempty"`
	Port        int      `json:"port,omitempty"`
}

// File is a static list of all nodes, the same on each of them.
type File struct {
	Settings SettingsSpec `json:"settings"`
	Nodes    []Spec       `json:"nodes"`
}

// nameOK is by hand: a regular expression would be compiled at every start of
// the CNI plugin, and take a millisecond for it.
func nameOK(name string) bool {
	for i, c := range []byte(name) {
		inner := c == '.' || c == '-'
		if !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || inner && i > 0 && i < len(name)-1) {
			return false
		}
	}
	return name != "" && len(name) <= 253
}

// CheckName refuses what cannot be a node's name.
func CheckName(name string) error {
	if !nameOK(name) {
		return fmt.Errorf("node name %q is not usable: use at most 253 lower-case letters, digits, '-' and '.'", name)
	}
	return nil
}

// Parse reads one node.
func Parse(s Spec) (state.Node, error) {
	n := state.Node{Name: s.Name, Mode: state.NodeMode(s.Mode)}
	if err := CheckName(s.Name); err != nil {
		return n, err
	}
	if n.Mode == "" {
		n.Mode = state.NodeDirect
	}
	if n.Mode != state.NodeDirect && n.Mode != state.NodeVXLAN {
		return n, fmt.Errorf("node %s: mode %q is unknown: use direct or vxlan", s.Name, s.Mode)
	}
	if err := parseAddrs(s, &n); err != nil {
		return n, err
	}
	for _, text := range s.PodCIDRs {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() || p.Bits() == 0 || p.Addr().Is4In6() {
			return n, fmt.Errorf("node %s: pod CIDR %q is not a network: write ADDRESS/LENGTH without bits after the length, which is not 0", s.Name, text)
		}
		for _, special := range noPods {
			if p.Overlaps(special) {
				return n, fmt.Errorf("node %s: pod CIDR %s has addresses of %s, which are no pod's: give the network of the node's pods", s.Name, p, special)
			}
		}
		if n.Mode == state.NodeDirect && !n.Addr(p.Addr().Is4()).IsValid() {
			return n, fmt.Errorf("node %s: pod CIDR %s has no address of its family beside it: add one, or use mode vxlan", s.Name, p)
		}
		for _, q := range n.PodCIDRs {
			if p.Overlaps(q) {
				return n, fmt.Errorf("node %s: pod CIDRs %s and %s overlap: drop one", s.Name, q, p)
			}
		}
		n.PodCIDRs = append(n.PodCIDRs, p)
	}
	return n, nil
}

// noPods are networks of this host (RFC 1122 3.2.1.3), of links (RFC 3927, RFC 4291 2.5.6) and of groups.
var noPods = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

func parseAddrs(s Spec, n *state.Node) error {
	for _, text := range s.Address {
		a, err := netip.ParseAddr(text)
		a = a.Unmap()
		switch {
		case err != nil || a.Zone() != "":
			return fmt.Errorf("node %s: address %q is not an IP address", s.Name, text)
		case a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast():
			return fmt.Errorf("node %s: address %s cannot be reached from other nodes: give the one on the wire", s.Name, a)
		case n.Addr(a.Is4()).IsValid():
			return fmt.Errorf("node %s: %s and %s are of one family: give at most one of each", s.Name, n.Addr(a.Is4()), a)
		}
		n.Addrs = append(n.Addrs, a)
	}
	if len(n.Addrs) == 0 {
		return fmt.Errorf("node %s: address is missing: give an IPv4 address, an IPv6 address or both", s.Name)
	}
	slices.SortFunc(n.Addrs, netip.Addr.Compare)
	return nil
}

// ParseFile reads a list, which must agree in itself.
func ParseFile(f File) ([]state.Node, error) {
	var out []state.Node
	var errs []error
	var set Set
	for _, s := range f.Nodes {
		n, err := Parse(s)
		if err == nil {
			err = set.Add(n)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, n)
	}
	return out, errors.Join(errs...)
}

// Apply is base with what s says.
func (s SettingsSpec) Apply(base state.NodeSettings) (state.NodeSettings, error) {
	switch r := state.HostRouting(s.HostRouting); r {
	case "":
	case state.RoutingEBPF, state.RoutingLegacy:
		base.HostRouting = r
	default:
		return base, fmt.Errorf("host routing %q is unknown: use ebpf or legacy", s.HostRouting)
	}
	if slices.Equal(s.Devices, []string{AutoDevices}) {
		base.Devices = nil
	} else if len(s.Devices) > 0 {
		base.Devices = s.Devices
	}
	if s.VNI < 0 || s.VNI > maxVNI {
		return base, fmt.Errorf("VNI %d is out of range: use 1 to %d", s.VNI, maxVNI)
	}
	if s.Port < 0 || s.Port > 65535 {
		return base, fmt.Errorf("port %d is out of range: use 1 to 65535", s.Port)
	}
	if s.VNI != 0 {
		base.VNI = uint32(s.VNI)
	}
	if s.Port != 0 {
		base.Port = uint16(s.Port)
	}
	return base, nil
}

// DefaultSettings are those of a node that was told nothing.
func DefaultSettings() state.NodeSettings {
	return state.NodeSettings{HostRouting: state.RoutingEBPF, VNI: DefaultVNI, Port: DefaultPort}
}
