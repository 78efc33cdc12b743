// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// guardParent makes the egress of ep's parent link check what ep sends, and
// learns the children that the host itself has there. Nothing to do for an
// endpoint without a parent in this namespace.
func (e *Engine) guardParent(ep state.Endpoint) error {
	parent, err := parentLink(ep)
	if err != nil || parent == nil {
		return err
	}
	mac := parent.Attrs().HardwareAddr
	record := datapath.Parent{Mac: [6]uint8(mac)}
	keys, ids := []datapath.ChildKey{datapath.ChildOf(ep.Parent, ep.MAC)}, []uint32{ep.ID}
	if bytes.Equal(ep.MAC, mac) {
		record.SharedMac, keys, ids = 1, nil, nil
	} else {
		hosts, err := hostChildren(ep.Parent)
		if err != nil {
			return err
		}
		for _, h := range hosts {
			keys, ids = append(keys, datapath.ChildOf(ep.Parent, h)), append(ids, 0)
		}
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
	if len(l.Attrs().HardwareAddr) != 6 {
		return nil, nil
	}
	return l, nil
}

// hostChildren are the link addresses of the macvlan children of a parent that
// are in this namespace.
func hostChildren(parent int) ([]([]byte), error) {
	links, err := netns.Dump(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var out [][]byte
	for _, l := range links {
		a := l.Attrs()
		if a.ParentIndex == parent && (l.Type() == "macvlan" || l.Type() == "macvtap") && len(a.HardwareAddr) == 6 {
			out = append(out, a.HardwareAddr)
		}
	}
	return out, nil
}
