// SPDX-License-Identifier: Apache-2.0

package observe

// What the node's kernel does with what a pod sends, where no program does it.

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// routeByNode asks the node's kernel as if the packet had come from ep, which is
// not as if the node had sent it: rules, filters of sources and forwarding count.
func (q *question) routeByNode(w *Way, frame []byte, ep state.Endpoint, dst netip.Addr) error {
	const at = "the node's kernel"
	if dst.IsMulticast() || dst == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		w.step(at, "kernel", Forwarded, "what is sent to many at once ends at the node")
		w.end(Forwarded, "it passes, and reaches the node, which does not pass on what is sent to many at once", "")
		return nil
	}
	in, err := netlink.LinkByIndex(ep.IfIndex)
	if err != nil {
		return fmt.Errorf("find the node's end of %s: %w", describe(ep), err)
	}
	if master := in.Attrs().MasterIndex; master != 0 { // the kernel takes a bridge's packets for the bridge's
		if l, err := netlink.LinkByIndex(master); err == nil && l.Type() == "bridge" {
			in = l
		}
	}
	name := in.Attrs().Name
	routes, err := netlink.RouteGetWithOptions(net.IP(dst.AsSlice()),
		&netlink.RouteGetOptions{IifIndex: in.Attrs().Index, SrcAddr: net.IP(source(frame).AsSlice())})
	if err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL {
		w.step(at, "kernel", Forwarded, fmt.Sprintf("%s is the node's own address", dst))
		w.end(Forwarded, "it passes, and reaches the node itself", "")
		return nil
	}
	if key, on := forwards(name, dst); !on {
		w.step(at, "kernel", NoRoute, fmt.Sprintf("it forwards nothing from %s: %s is 0", name, key))
		w.end(NoRoute, "mustang lets it pass, but the node forwards nothing", fmt.Sprintf("have the node forward: `sysctl -w %s=1`", key))
		return nil
	}
	if err != nil || len(routes) == 0 {
		w.step(at, "kernel", NoRoute, fmt.Sprintf("it has no route to %s for what comes from %s by %s: %v", dst, source(frame), name, err))
		w.end(NoRoute, "mustang lets it pass, but the node has no route there", fmt.Sprintf("give the node a route to %s (`ip route get %s from %s iif %s` asks it)", dst, dst, source(frame), name))
		return nil
	}
	r := routes[0]
	if dst.IsLinkLocalUnicast() && dst.Is6() {
		w.step(at, "kernel", NoRoute, "it does not pass on what is sent to a link-local address")
		w.end(NoRoute, "mustang lets it pass, but a link-local address is none beyond the pod's own link", "use another address of the receiver's")
		return nil
	}
	by := "by " + linkName(r.LinkIndex)
	if r.Gw != nil {
		by = "via " + r.Gw.String() + " " + by
	}
	w.step(at, "kernel", Forwarded, "it routes it "+by+firewall())
	w.end(Forwarded, "it passes, and leaves the node "+by+"; what happens there is not this node's to say", "")
	return nil
}

// firewall names the chains that have a say in what the node's kernel forwards, as
// the rest of a sentence: they are not asked.
func firewall() string {
	rules, err := engine.Firewall()
	if err != nil || len(rules) == 0 {
		return ""
	}
	var chains []string
	for _, r := range rules {
		name := fmt.Sprintf("%s of table %s (%s", r.Chain, r.Table, r.Backend)
		if r.Policy != "" {
			name += ", policy " + r.Policy
		}
		chains = append(chains, name+")")
	}
	return ", if the host's firewall lets it, which is not asked: chain " + strings.Join(chains, ", ")
}

// forwards says whether the node's kernel forwards to dst what comes in by an
// interface, and which sysctl says so. One that cannot be read says nothing.
func forwards(in string, dst netip.Addr) (key string, on bool) {
	keys := []string{"ipv4/ip_forward", "ipv4/conf/" + in + "/forwarding"}
	if dst.Is6() {
		keys = []string{"ipv6/conf/all/forwarding"}
	}
	for _, k := range slices.Backward(keys) { // the last one decides; the first that is 0 is the one to change
		if !netns.SysctlOff(k) {
			break
		}
		key = "net/" + k
	}
	return key, key == ""
}
