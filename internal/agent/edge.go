// SPDX-License-Identifier: Apache-2.0

package agent

// The edge: clients outside and the node's own sockets, at the devices that the
// user names, or at those that have this Node's addresses; where lo has them, as on
// routers, at those of the default routes.

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
}

// followEdge brings the edge to the devices that are there now.
func (s *syncer) followEdge(ctx context.Context) {
	if !s.edgeKnown && !s.edgeAway || s.edgeRetry.fails() {
		return // it is tried again as it is
	}
	if len(s.a.config.Devices) == 0 { // the Node's addresses may have come to others
		s.placeEdge(ctx)
	}
	if s.edgeRetry.fails() || len(s.edgeDevices) == 0 {
		return
	}
	want := s.edgeAt(s.edgeDevices)
	changed := false
	err := s.a.with(ctx, func(e *engine.Engine) (err error) {
		changed, err = e.FollowEdge(want)
		return err
	})
	switch {
	case err != nil && ctx.Err() == nil:
		// A NIC on its way: whoever brings it back changes it once more.
		s.a.log.Warn("clients outside are not served as they should be; the next change of the devices is another try", "devices", want.Devices, "error", err)
	case changed:
		s.a.log.Info("the edge follows this node's devices", "devices", want.Devices)
	}
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
}

// wantedEdge is the edge that the Node asks for; stays: what is at work does, for it is not known who has the
// Node's addresses. They may be on their way back, or to another device.
func (s *syncer) wantedEdge(ctx context.Context) (want engine.Edge, stays bool, err error) {
	want = s.edgeAt(s.a.config.Devices)
	if slices.Contains(want.Devices, None) {
		want.Devices, want.Prefixes = nil, nil
		return want, false, nil
	}
	if len(want.Devices) > 0 {
		return want, false, nil
	}
	self := s.a.watch.Nodes.Get(s.a.nodeKey())
	if self == nil {
		return want, true, nil
	}
	want.Devices, err = devicesOf(self.Addrs)
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

// devicesOf are the links that have one of these addresses, by name; where that is
// lo alone, those of the default routes.
func devicesOf(addrs []netip.Addr) ([]string, error) {
	list, err := netns.Addrs(nil)
	if err != nil {
		return nil, fmt.Errorf("list this node's addresses: %w", err)
	}
	var out []string
	byLo := false
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); !ok || !slices.Contains(addrs, ip.Unmap()) {
			continue
		}
		l, err := net.InterfaceByIndex(a.LinkIndex)
		if err != nil {
			return nil, fmt.Errorf("look at the device of %s: %w", a.IP, err)
		}
		if l.Flags&net.FlagLoopback != 0 {
			byLo = true
			continue
		}
		out = append(out, l.Name)
	}
	if byLo && len(out) == 0 {
		devices, err := node.DefaultDevices()
		if err != nil {
			return nil, err
		}
		for _, d := range devices {
			out = append(out, d.Name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}
