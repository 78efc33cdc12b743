// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// guardParent makes the egress of ep's parent link check what ep sends, and
// learns the children that the node itself has there. Nothing to do for an
// endpoint without a parent in this namespace.
func (e *Engine) guardParent(ep state.Endpoint) error {
	parent, err := parentLink(ep)
	if err != nil || parent == nil {
		return err
	}
	mac := parent.Attrs().HardwareAddr
	record := datapath.Parent{Mac: [6]uint8(mac)}
	keys, err := ownChildren(ep.Parent)
	if err != nil {
		return err
	}
	ids := make([]uint32, len(keys))
	if bytes.Equal(ep.MAC, mac) {
		record.SharedMac = 1
	} else {
		keys, ids = append(keys, datapath.ChildOf(ep.Parent, ep.MAC)), append(ids, ep.ID)
	}
	if err := e.dp.Children.Put(keys, ids); err != nil {
		return err
	}
	if err := e.dp.Parents.Put([]uint32{uint32(ep.Parent)}, []datapath.Parent{record}); err != nil {
		return err
	}
	return e.dp.AttachParent(ep.Parent, ep.Attach)
}

// releaseParent is the reverse: the last endpoint of a parent takes the program
// off it.
func (e *Engine) releaseParent(ep state.Endpoint) error {
	if ep.Parent == 0 {
		return nil
	}
	for id, other := range e.known {
		if id != ep.ID && other.Parent == ep.Parent {
			return e.dp.Children.Delete([]datapath.ChildKey{datapath.ChildOf(ep.Parent, ep.MAC)})
		}
	}
	children, err := e.dp.Children.All()
	var gone []datapath.ChildKey
	for k := range children {
		if k.Parent == uint32(ep.Parent) {
			gone = append(gone, k)
		}
	}
	return errors.Join(err, e.dp.DetachParent(ep.Parent), e.dp.Parents.Delete([]uint32{uint32(ep.Parent)}),
		e.dp.Children.Delete(gone))
}

// parentLink is nil when ep has no parent, or has it in another namespace.
func parentLink(ep state.Endpoint) (netlink.Link, error) {
	if ep.Placement != state.InPod || ep.Parent == 0 {
		return nil, nil
	}
	l, err := netlink.LinkByIndex(ep.Parent)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up the parent link of %s: %w", ep.IfName, err)
	}
	if !peers.HasLinkHeader(l.Attrs().HardwareAddr) {
		return nil, nil
	}
	return l, nil
}

// ownChildren are the keys of a parent's children in this namespace, the node's
// own: by their link addresses, where they have one each, and as routes show them.
func ownChildren(parent int) (keys []datapath.ChildKey, err error) {
	links, err := netns.Links()
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		if a.ParentIndex != parent || a.NetNsID >= 0 { // then that index is another namespace's
			continue
		}
		switch l.Type() {
		case "macvlan", "macvtap":
			if len(a.HardwareAddr) == 6 {
				keys = append(keys, datapath.ChildOf(parent, a.HardwareAddr))
			}
			keys = append(keys, datapath.OwnChildOf(parent, a.Index))
		case "ipvlan", "ipvtap":
			keys = append(keys, datapath.OwnChildOf(parent, a.Index))
		}
	}
	return keys, nil
}
