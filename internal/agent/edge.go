// SPDX-License-Identifier: Apache-2.0

package agent

// The edge: clients outside and the node's own sockets, at the devices that the
// user names, or at those that have this Node's addresses and those of the default
// routes, by which clients may come, too, as where lo has the addresses.

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/node"
)

// edge puts the edge where the Node says, with each change of it.
func (s *syncer) edge(ctx context.Context, changes []k8s.Change) {
	if aboutNodes(changes) || s.edgeRetry.again() {
		s.placeEdge(ctx)
	}
	if s.followRetry.again() {
		s.followEdge(ctx)
	}
}

// followEdge brings the edge to the devices that are there now.
func (s *syncer) followEdge(ctx context.Context) {
	start := time.Now()
	err := s.bringEdge(ctx)
	switch {
	case err == nil:
		s.followRetry.succeeded()
	case ctx.Err() == nil:
		// It may be a NIC on its way, or a passing want of memory, of which no further change of devices tells.
		s.followRetry.wait(start)
		s.a.metrics.failures.Inc()
		s.a.log.Warn("clients outside are not served as they should be; it is tried again", "devices", s.edgeDevices, "error", err)
	}
}

func (s *syncer) bringEdge(ctx context.Context) error {
	if !s.edgeKnown && !s.edgeAway || s.edgeRetry.fails() {
		return nil // it is tried again as it is
	}
	s.placeEdge(ctx) // the Node's addresses may have come to others, or a named one is back
	if s.edgeRetry.fails() || len(s.edgeDevices) == 0 {
		return nil
	}
	want := s.edgeAt(s.edgeDevices)
	return s.a.with(ctx, func(e *engine.Engine) error {
		changed, err := e.FollowEdge(want)
		if changed && err == nil {
			s.a.log.Info("the edge follows this node's devices", "devices", want.Devices)
		}
		return err
	})
}

// edgeAt is the edge as it is configured, at these devices.
func (s *syncer) edgeAt(devices []string) engine.Edge {
	e := engine.Edge{Devices: devices, Host: s.a.config.HostServices}
	e.Prefixes, _ = s.a.config.prefixes() // checked at the start
	return e
}

// placeEdge puts the edge where it belongs, unless it is there.
func (s *syncer) placeEdge(ctx context.Context) {
	start := time.Now()
	want, stays, err := s.wantedEdge(ctx)
	if err == nil && stays {
		s.edgeRetry.succeeded()
		return
	}
	if err == nil && s.edgeKnown && !s.edgeRetry.fails() && slices.Equal(want.Devices, s.edgeDevices) {
		return
	}
	if err == nil {
		err = s.a.with(ctx, func(e *engine.Engine) error { return e.SetEdge(want) })
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		s.edgeRetry.wait(start)
		s.a.metrics.failures.Inc()
		s.a.log.Error("clients outside cannot be served; it is tried again", "devices", want.Devices, "error", err)
		return
	}
	s.edgeRetry.succeeded()
	s.edgeDevices, s.edgeKnown = want.Devices, true
	s.a.log.Info("the edge is in force", "devices", want.Devices, "host", want.Host)
	if none := want.CheckPrefixes(); none != nil {
		s.a.log.Warn("no address of this node takes node ports", "reason", none)
	}
}

// wantedEdge is the edge that the Node asks for; stays: what is at work does, for it is not known who has the
// Node's addresses, or no device is there that settings name. They may be on their way back, or to another device.
func (s *syncer) wantedEdge(ctx context.Context) (want engine.Edge, stays bool, err error) {
	want = s.edgeAt(s.a.config.Devices)
	if slices.Contains(want.Devices, None) {
		want.Devices, want.Prefixes = nil, nil
		return want, false, nil
	}
	if len(want.Devices) > 0 {
		here, err := node.NamedDevices(want.Devices)
		if len(here) == 0 {
			return want, s.edgeKnown, err
		}
		want.Devices = nil
		for _, d := range here { // the others are waited for
			want.Devices = append(want.Devices, d.Name)
		}
		return want, false, err
	}
	self := s.a.watch.Nodes.Get(s.a.nodeKey())
	if self == nil {
		return want, true, nil
	}
	want.Devices, err = s.edgeDevicesOf(self)
	if err != nil || len(want.Devices) > 0 {
		s.edgeAway = s.edgeAway && err != nil
		return want, false, err
	}
	err = s.a.with(ctx, func(e *engine.Engine) error {
		now, err := e.Edge()
		stays = len(now.Devices) > 0
		return err
	})
	if stays && !s.edgeAway {
		s.a.log.Warn("no device has the Node's addresses; clients outside are served where they were", "addresses", self.Addrs)
	}
	s.edgeAway = stays
	return want, stays, err
}

// edgeDevicesOf are the links behind which clients outside may be: those that have the Node's
// addresses, its internal ones first, and those of the default routes. None while nothing
// here has its internal ones. A link that a default route led by stays, as long as it is there.
func (s *syncer) edgeDevicesOf(n *k8s.Node) ([]string, error) {
	out, known, err := devicesOf(n.Addrs)
	if err != nil || !known {
		return nil, err
	}
	external, _, err := devicesOf(n.External)
	if err != nil {
		return nil, err
	}
	defaults, err := node.DefaultDevices()
	if err != nil {
		return nil, err
	}
	s.edgeDefaults = slices.DeleteFunc(s.edgeDefaults, func(name string) bool { _, err := net.InterfaceByName(name); return err != nil })
	for _, d := range defaults {
		l, err := net.InterfaceByName(d.Name)
		if err == nil && node.HasLinkHeader(l.HardwareAddr) && !slices.Contains(s.edgeDefaults, d.Name) {
			s.edgeDefaults = append(s.edgeDefaults, d.Name)
		}
	}
	slices.Sort(s.edgeDefaults)
	for _, name := range slices.Concat(external, s.edgeDefaults) {
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out, nil
}

// devicesOf are the links that have one of these addresses, by name, but for lo and those that carry IP alone,
// where programs see no link header; known: some link has.
func devicesOf(addrs []netip.Addr) (out []string, known bool, err error) {
	list, err := netns.Addrs(nil)
	if err != nil {
		return nil, false, fmt.Errorf("list this node's addresses: %w", err)
	}
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); !ok || !slices.Contains(addrs, ip.Unmap()) {
			continue
		}
		l, err := net.InterfaceByIndex(a.LinkIndex)
		if err != nil {
			return nil, false, fmt.Errorf("look at the device of %s: %w", a.IP, err)
		}
		known = true
		if node.HasLinkHeader(l.HardwareAddr) && l.Flags&net.FlagLoopback == 0 {
			out = append(out, l.Name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), known, nil
}
