// SPDX-License-Identifier: Apache-2.0

package link

// What the ways of connecting a pod have in common and what not, and which of
// them this kernel knows.

import (
	"errors"
	"fmt"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// The ways of connecting a pod.
const (
	Veth       = "veth"
	Bridge     = "bridge"
	Macvlan    = "macvlan"
	IPVlan     = "ipvlan"    // l2
	IPVlanL3   = "ipvlan-l3" // the parent routes
	Netkit     = "netkit"    // l2
	NetkitL3   = "netkit-l3" // without link addresses
	HostDevice = "host-device"
)

// Modes are all of them.
var Modes = []string{Veth, Bridge, Macvlan, IPVlan, IPVlanL3, Netkit, NetkitL3, HostDevice}

// traits are what callers must know of a mode.
type traits struct {
	kind   string // of device, as the kernel calls it; "" for one that need not be probed
	since  string // where to get that kind of device
	routed bool   // the host is the pod's router, and nobody owns the gateway's address
	pair   bool   // one end is the host's
	uplink string // what it needs an interface of the node for
	noMAC  string // why the pod's interface cannot be given an address
	// noLease is why the network cannot give it its IP addresses
	noLease string
}

const ipvlanSince = "CONFIG_IPVLAN; use veth, bridge or macvlan"
const netkitSince = "Linux 6.7 or later, CONFIG_NETKIT; use veth"
const sharedMAC = "pods by ipvlan share their uplink's"
const noSegment = "its pods have no segment to ask on"
const sharedLease = "pods by ipvlan share their uplink's link address, so the answers would not find them"

var traitsOf = map[string]traits{
	Veth:       {routed: true, pair: true, noLease: noSegment},
	Bridge:     {pair: true},
	Macvlan:    {kind: "macvlan", since: "CONFIG_MACVLAN; use veth or bridge", uplink: "to build on"},
	IPVlan:     {kind: "ipvlan", since: ipvlanSince, uplink: "to build on", noMAC: sharedMAC, noLease: sharedLease},
	IPVlanL3:   {kind: "ipvlan", since: ipvlanSince, uplink: "to build on", noMAC: sharedMAC, noLease: noSegment},
	Netkit:     {kind: "netkit", since: netkitSince, routed: true, pair: true, noLease: noSegment},
	NetkitL3:   {kind: "netkit", since: netkitSince, routed: true, pair: true, noMAC: "netkit-l3 has no link addresses", noLease: noSegment},
	HostDevice: {uplink: "that is moved into the pod"},
}

// Routed says whether pods of a mode have no segment: their addresses need no
// prefix length.
func Routed(mode string) bool { return traitsOf[mode].routed }

// OnSegment says whether pods of a mode are neighbours of others on a segment, of whom one
// may be their router.
func OnSegment(mode string) bool { return traitsOf[mode].noLease != noSegment }

// HasHostEnd says whether one end of the pod's link is on the node.
func HasHostEnd(mode string) bool { return traitsOf[mode].pair }

// NeedsUplink says whether a mode needs an interface of the node.
func NeedsUplink(mode string) bool { return traitsOf[mode].uplink != "" }

// Supported is nil when this kernel can connect pods by mode, else an
// errors.ErrUnsupported that says what it lacks. The answer is kept for the
// process.
func Supported(mode string) error {
	// Said before anything is made: the datapath would refuse the pod when its link is there.
	if _, err := netns.Cookie(); errors.Is(err, unix.ENOPROTOOPT) {
		return &unsupported{fmt.Sprintf("mode %s: %v", mode, err)}
	}
	t := traitsOf[mode]
	if t.kind == "" || !kernelLacks(t.kind) {
		return nil
	}
	return &unsupported{fmt.Sprintf("mode %s: this kernel has no %s devices (%s)", mode, t.kind, t.since)}
}

type unsupported struct{ sentence string }

func (e *unsupported) Error() string { return e.sentence }
func (e *unsupported) Unwrap() error { return errors.ErrUnsupported }

var lacks sync.Map // kind → func() bool

// kernelLacks probes for a kind of device, once. Whoever may not ask gets no
// verdict; making the device will tell.
func kernelLacks(kind string) bool {
	probe, _ := lacks.LoadOrStore(kind, sync.OnceValue(func() bool {
		return errors.Is(askFor(kind), unix.EOPNOTSUPP)
	}))
	return probe.(func() bool)()
}

// askFor asks for a device that cannot be: without the parent that macvlan and
// ipvlan need, with a policy that netkit does not have. A kernel that knows the
// kind, or has a module for it, refuses the request; one that does not refuses
// the kind.
func askFor(kind string) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("mst-probe")))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(kind))
	if kind == "netkit" {
		const noPolicy = 0x7fff
		info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(nl.IFLA_NETKIT_POLICY, nl.Uint32Attr(noPolicy))
	}
	req.AddData(info)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}
