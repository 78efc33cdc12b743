// SPDX-License-Identifier: Apache-2.0

// Package link connects a pod to its node: one file per way of doing it.
//
// All of it happens between two network namespaces: the node's, which is the
// one the calling thread is in, and the pod's, which is given by path. Links
// are created where they belong and never moved, because a moved link loses
// its settings and tells everybody who watches that it went away.
package link

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// DefaultBridge is the bridge of bridge mode when Spec names none.
const DefaultBridge = "mst-br0"

// DefaultIfName is the pod's interface when Spec names none.
const DefaultIfName = "eth0"

// VethGateway4 and VethGateway6 are the next hops that routed pods see. They
// are the same on every node and nobody needs to own them: a permanent
// neighbour entry leads to the host's end of the pair.
var (
	VethGateway4 = netip.MustParseAddr("169.254.10.24")
	VethGateway6 = netip.MustParseAddr("fe80::a9fe:a18")
)

// ErrExists says that the pod is connected already.
var ErrExists = errors.New("already connected")

// ErrForeign says that the pod has an interface of that name by somebody else.
var ErrForeign = errors.New("not mustang's")

// Spec describes one pod's connection.
type Spec struct {
	Name  string // the pod's name, unique on its node
	Mode  string // one of Modes
	NetNS string // path of the pod's network namespace
	// Here is how this process gets at what others have opened for it, where it
	// sees other files than they.
	Here       Here
	IfName     string       // in the pod; "" means DefaultIfName
	HostIfName string       // veth, bridge and netkit: the host's end; "" means HostName(Name)
	IPv4       netip.Prefix // the prefix length does not matter to the routed modes, veth and netkit
	IPv6       netip.Prefix // at least one of the two
	// Gateway4 zero: routed modes: VethGateway4; else the first address of IPv4's
	// prefix, or none where Foreign. The node holds it, except on the network that the
	// uplink is on.
	Gateway4 netip.Addr
	Gateway6 netip.Addr // likewise
	// Foreign says that somebody else gives out the addresses, who knows what is on the
	// pods' segment: a gateway that he does not name is none, and one that he names may be
	// a router out there, which the node asks for before it takes the address. It means
	// nothing where pods are not OnSegment.
	Foreign    bool
	MTU        int              // bytes; 0 means 1500, or the uplink's where there is one
	Uplink     string           // macvlan, ipvlan: the parent on the node; host-device: what is moved into the pod
	BridgeName string           // bridge: "" means DefaultBridge
	MAC        net.HardwareAddr // of the pod's interface, where it has its own; nil means random, or the device's
	// Open lets packets pass before programs are attached. A netkit pair is made
	// closed otherwise; the other modes know no such state.
	Open bool
	// LocalMTU, in bytes, is what the pod may send at once to pods of its node,
	// which are in LocalCIDRs, in bundles as large as the kernel has them; 0: no more
	// than MTU. Only where CanLocalMTU.
	LocalMTU   int
	LocalCIDRs []netip.Prefix
	RouteMTU   int // bytes, of the default routes of a pod behind a host end; 0, or not less than MTU: none
	BigTCP     int // bytes of the largest bundle of segments; 0: the kernel's 65536
	// Tunnel says that pods of other nodes are reached by one, which takes no bundle
	// larger than the kernel's 65536.
	Tunnel bool
	// ToNodes, once Attach has returned, says RouteMTU and Tunnel: what they are may
	// become known while it waits. nil: they are as they stand here.
	ToNodes func() (routeMTU int, tunnel bool, err error)
	// Lease gives the addresses, where the network does: it is called once the
	// interface is up, and IPv4 to Gateway6 are empty. Only where CanLease. Attach
	// is called twice then, first with an endpoint that has no addresses.
	Lease func() (Lease, error)
	// Device, of host-device, is what the uplink was like on the node, and is to be
	// again; nil: nobody remembers. Add finds out itself, and tells Taking before it
	// changes anything, so that somebody does.
	Device *Device
	Taking func(Device) error
	// Attach is told of the interface while it is still down, so that whoever
	// puts programs on it is before the first packet; nil: nobody does. What it
	// did is not undone when Add fails later.
	Attach func(state.Endpoint) error
}

// Here are paths in the calling process's own view; "": the usual ones.
type Here struct {
	NetNS   string // of the pod's network namespace, which NetNS names for others
	Sysctls string // of /proc/sys/net
}

// Sysctl is the file of one below net.
func (h Here) Sysctl(key string) string {
	if h.Sysctls == "" {
		return netns.Sysctl(key)
	}
	return filepath.Join(h.Sysctls, key)
}

// Result is what was made, in the numbers that a datapath needs.
type Result struct {
	HostIfIndex        int              // of the host's end, or of the shim; host-device: 0
	HostMAC            net.HardwareAddr // of that interface
	HostMTU            int
	PodIfIndex         int // in the pod's namespace
	PodMAC             net.HardwareAddr
	PodMTU             int
	ParentIfIndex      int              // bridge: the bridge; macvlan, ipvlan: the uplink; else 0
	ParentMAC          net.HardwareAddr // of that interface
	ParentMTU          int
	Gateway4, Gateway6 netip.Addr // the pod's next hops; zero: none
	// Default4 and Default6 say whether the pod's default route leads by this
	// interface: a second one leaves it to the first.
	Default4, Default6 bool
	BigTCP             BigTCP
}

// HostName is the name of the host's end for a pod: deterministic, so that a
// later process finds what an earlier one made, and within the kernel's 15
// characters.
func HostName(pod string) string {
	sum := sha256.Sum256([]byte(pod))
	return "mst" + hex.EncodeToString(sum[:6])
}

// ifNameOK is by hand: a regular expression would be compiled at every start.
func ifNameOK(name string) bool {
	for _, c := range []byte(name) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-' || c == '.') {
			return false
		}
	}
	return name != "" && len(name) <= 15 && name[0] != '.'
}

// withDefaults fills what the caller left open.
func (s Spec) withDefaults() Spec {
	if s.IfName == "" {
		s.IfName = DefaultIfName
	}
	if s.HostIfName == "" {
		s.HostIfName = HostName(s.Name)
	}
	if s.BridgeName == "" {
		s.BridgeName = DefaultBridge
	}
	if !s.Foreign || !OnSegment(s.Mode) {
		s.Gateway4 = gatewayOr(s.Gateway4, s.IPv4, s.Mode, VethGateway4)
		s.Gateway6 = gatewayOr(s.Gateway6, s.IPv6, s.Mode, VethGateway6)
	}
	return s
}

// KnownMode refuses what is no way of connecting a pod.
func KnownMode(mode string) error {
	if _, known := traitsOf[mode]; !known {
		return fmt.Errorf("mode %q is unknown: use one of %s", mode, strings.Join(Modes, ", "))
	}
	return nil
}

func (s Spec) netnsHere() string { return cmp.Or(s.Here.NetNS, s.NetNS) }

// sysctl is the file of one below net.
func (s Spec) sysctl(key string) string { return s.Here.Sysctl(key) }

// Bridge is the name of the bridge, defaults filled in.
func (s Spec) Bridge() string { return s.withDefaults().BridgeName }

func gatewayOr(gw netip.Addr, ip netip.Prefix, mode string, routed netip.Addr) netip.Addr {
	switch {
	case gw.IsValid() || !ip.IsValid():
		return gw
	case traitsOf[mode].routed:
		return routed
	}
	return ip.Masked().Addr().Next()
}

// Validate checks the spec without touching the kernel. Each error is one
// sentence that names the field and the mend.
func (s Spec) Validate() error {
	s = s.withDefaults()
	if s.Name == "" {
		return errors.New("name is empty: name the pod")
	}
	if err := KnownMode(s.Mode); err != nil {
		return err
	}
	t := traitsOf[s.Mode]
	for field, name := range map[string]string{"interface": s.IfName, "host interface": s.HostIfName, "bridge": s.BridgeName} {
		if !ifNameOK(name) {
			return fmt.Errorf("%s name %q is not usable: use 1 to 15 letters, digits, '.', '_' or '-'", field, name)
		}
	}
	if t.uplink != "" && s.Uplink == "" {
		return fmt.Errorf("uplink is missing: %s needs the node's interface %s", s.Mode, t.uplink)
	}
	if s.MAC != nil && t.noMAC != "" {
		return fmt.Errorf("MAC %s cannot be given: %s", s.MAC, t.noMAC)
	}
	if s.MAC != nil && (len(s.MAC) != 6 || s.MAC[0]&1 != 0) {
		return fmt.Errorf("MAC %s is not a unicast Ethernet address", s.MAC)
	}
	if s.Lease != nil && t.noLease != "" {
		return fmt.Errorf("addresses cannot come from the network: %s; use %s, %s or %s", t.noLease, Macvlan, Bridge, HostDevice)
	}
	if err := s.validateAddrs(); err != nil && s.Lease == nil {
		return err
	}
	if err := ValidateMTU(s.MTU, s.IPv6.IsValid()); err != nil {
		return err
	}
	return errors.Join(s.validateLocalMTU(), s.ValidateBigTCP())
}

// ValidateMTU refuses what an interface with such addresses cannot have; 0 is what
// its mode makes it.
func ValidateMTU(mtu int, v6 bool) error {
	low := 68 // RFC 791
	if v6 {
		low = 1280 // RFC 8200 5
	}
	if mtu != 0 && (mtu < low || mtu > 65535) {
		return fmt.Errorf("MTU %d is out of range: use %d to 65535", mtu, low)
	}
	return nil
}

func (s Spec) validateAddrs() error {
	if !s.IPv4.IsValid() && !s.IPv6.IsValid() {
		return errors.New("IP is missing: give an IPv4 address, an IPv6 address or both")
	}
	for _, a := range []struct {
		family string
		ip     netip.Prefix
		gw     netip.Addr
		right  bool
	}{
		{"IPv4", s.IPv4, s.Gateway4, s.IPv4.Addr().Is4() && (!s.Gateway4.IsValid() || s.Gateway4.Is4())},
		{"IPv6", s.IPv6, s.Gateway6, s.IPv6.Addr().Is6() && !s.IPv6.Addr().Is4In6() && (!s.Gateway6.IsValid() || s.Gateway6.Is6())},
	} {
		switch {
		case !a.ip.IsValid() && a.gw.IsValid():
			return fmt.Errorf("gateway %s has no %s address beside it: add one or drop the gateway", a.gw, a.family)
		case !a.ip.IsValid():
		case !a.right:
			return fmt.Errorf("IP %s or gateway %s is not %s: give each family its own", a.ip, a.gw, a.family)
		case a.ip.Addr().IsUnspecified() || a.ip.Addr().IsMulticast() || a.ip.Addr().IsLoopback():
			return fmt.Errorf("IP %s cannot be a pod's: use a unicast address", a.ip.Addr())
		case a.ip.Addr().Is6() && a.ip.Addr().IsLinkLocalUnicast():
			return fmt.Errorf("IP %s cannot be a pod's: with a link-local address it reaches nobody; use a global or unique-local one", a.ip.Addr())
		case !traitsOf[s.Mode].routed && a.ip.Addr() == broadcast(a.ip):
			return fmt.Errorf("IP %s cannot be a pod's: it is the broadcast address of %s", a.ip.Addr(), a.ip.Masked())
		case a.ip.Addr() == a.gw:
			return fmt.Errorf("IP %s is the gateway's address: give the pod another", a.gw)
		case !traitsOf[s.Mode].routed && a.gw.IsValid() && !a.ip.Contains(a.gw) && !(a.gw.Is6() && a.gw.IsLinkLocalUnicast()):
			return fmt.Errorf("gateway %s is outside %s: use one inside, or a shorter prefix", a.gw, a.ip.Masked())
		}
	}
	return nil
}

// broadcast is the address at which all of an IPv4 network are meant; none where it has two
// addresses or one.
func broadcast(p netip.Prefix) netip.Addr {
	if !p.Addr().Is4() || p.Bits() > 30 {
		return netip.Addr{}
	}
	b := p.Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(b)
}

// Add connects a pod. What an Add that was killed left half built is replaced;
// a complete connection is ErrExists. When Add fails, nothing of it stays
// except the bridge or the shim, which belong to the node.
func Add(spec Spec) (Result, error) {
	if err := spec.Validate(); err != nil {
		return Result{}, err
	}
	if err := Supported(spec.Mode); err != nil {
		return Result{}, err
	}
	spec = spec.withDefaults()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b, err := open(spec.netnsHere())
	if err != nil {
		return Result{}, fmt.Errorf("connect pod %s: %w", spec.Name, err)
	}
	defer b.close()
	b.Spec = spec

	if err := b.clearHalfBuilt(); err != nil {
		return Result{}, fmt.Errorf("connect pod %s: %w", spec.Name, err)
	}
	makers := map[string]func() (Result, error){
		Veth: b.addVeth, Bridge: b.addBridge, Macvlan: b.addMacvlan,
		IPVlan: b.addIPVlan, IPVlanL3: b.addIPVlan, Netkit: b.addNetkit, NetkitL3: b.addNetkit, HostDevice: b.addHostDevice,
	}
	res, err := makers[spec.Mode]()
	if err == nil {
		res.BigTCP, err = b.bundle()
	}
	if err == nil {
		err = b.awaitAddrs()
	}
	if err == nil {
		err = b.markComplete(res.PodIfIndex)
	}
	if err == nil {
		b.announce(res.PodIfIndex, res.PodMAC)
	}
	res.Gateway4, res.Gateway6 = b.Gateway4, b.Gateway6
	res.Default4, res.Default6 = b.defaults[unix.AF_INET], b.defaults[unix.AF_INET6]
	if err != nil {
		return Result{}, errors.Join(fmt.Errorf("connect pod %s: %w", spec.Name, err), b.remove())
	}
	return res, nil
}

// Delete takes a pod's connection away: by the pod's side, if its namespace is
// still there, and by the host's. What is absent is success. The bridge and
// the shim stay: they are the node's. A device that was moved into the pod
// comes back, down and without addresses, as Device says. What leads the node to spec's
// addresses goes, too: they must be this pod's.
func Delete(spec Spec) error {
	spec = spec.withDefaults()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b, err := open(spec.netnsHere())
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, netns.ErrNotNetNS) {
		b, err = open("")
	}
	if err != nil {
		return fmt.Errorf("disconnect pod %s: %w", spec.Name, err)
	}
	defer b.close()
	b.Spec, b.met = spec, true
	if err := b.remove(); err != nil {
		return fmt.Errorf("disconnect pod %s: %w", spec.Name, err)
	}
	return nil
}
