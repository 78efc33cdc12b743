// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"errors"
	"net"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// lookAt is an interface of a namespace, as it is now.
func lookAt(t *testing.T, ns, name string) *netlink.LinkAttrs {
	t.Helper()
	var l netlink.Link
	if err := netns.Do(ns, func() (err error) { l, err = netlink.LinkByName(name); return err }); err != nil {
		t.Fatal(err)
	}
	return l.Attrs()
}

func TestAttachIsToldBeforeTheInterfaceGoesUp(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		s := w.spec(mode, 0)
		var told state.Endpoint
		s.Attach = func(ep state.Endpoint) error {
			told = ep
			if a := lookAt(t, w.pods[0], ep.IfName); a.Flags&net.FlagUp != 0 {
				t.Errorf("%s in the pod is up already", a.Name)
			}
			if ep.Placement == state.HostEnd {
				if a := lookAt(t, w.node, ep.HostIf); a.Flags&net.FlagUp != 0 {
					t.Errorf("%s on the node is up already", a.Name)
				}
			}
			return nil
		}
		s.ToNodes = func() (int, bool, error) {
			if told.PodIndex == 0 {
				t.Error("the ways to other nodes are asked for before the endpoint is there")
			}
			return 0, false, nil
		}
		w.add(s)
		pod := lookAt(t, w.pods[0], DefaultIfName)
		mac := pod.HardwareAddr
		if mac == nil {
			mac = make(net.HardwareAddr, 6)
		}
		var cookie uint64
		if err := netns.Do(w.pods[0], func() (err error) { cookie, err = netns.Cookie(); return err }); err != nil {
			t.Fatal(err)
		}
		if told.PodIndex != pod.Index || !bytes.Equal(told.MAC, mac) || told.LinkMTU != pod.MTU || told.NetnsCookie != cookie ||
			told.IP4 != s.IPv4.Addr() || told.IP6 != s.IPv6.Addr() || told.Netns != w.pods[0] {
			t.Errorf("told of %+v, which is %+v", told, pod)
		}
		if told.Placement == state.HostEnd {
			host := lookAt(t, w.node, told.HostIf)
			if told.IfIndex != host.Index || told.MTU != host.MTU || mode == Veth && !bytes.Equal(told.NodeMAC, host.HardwareAddr) {
				t.Errorf("told of host end %+v, which is %+v", told, host)
			}
			if mode == Bridge && !bytes.Equal(told.NodeMAC, lookAt(t, w.node, DefaultBridge).HardwareAddr) {
				t.Errorf("the gateway's link address is %s, not the bridge's", told.NodeMAC)
			}
		} else if told.IfIndex != pod.Index || HasShim(mode) && told.Parent != lookAt(t, w.node, "up0").Index {
			t.Errorf("told of %+v, which is %+v", told, pod)
		}
	})
}

func TestAFailedAttachLeavesNothing(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.add(w.spec(mode, 1)) // what belongs to the node comes with the first
		before := [2][]string{w.links(w.node), w.links(w.pods[0])}
		s := w.spec(mode, 0)
		if mode == HostDevice {
			before[0] = w.links(w.node)
		}
		full := errors.New("the table is full")
		s.Attach = func(state.Endpoint) error { return full }
		if err := netns.Do(w.node, func() error { _, err := Add(s); return err }); !errors.Is(err, full) {
			t.Fatalf("got %v", err)
		}
		after := [2][]string{w.links(w.node), w.links(w.pods[0])}
		if d := cmp.Diff(before, after, cmp.Transformer("sorted", sorted)); d != "" {
			t.Errorf("left behind (+) or missing (-):\n%s", d)
		}
	})
}

func sorted(names []string) map[string]bool {
	out := make(map[string]bool)
	for _, n := range names {
		out[n] = true
	}
	return out
}
