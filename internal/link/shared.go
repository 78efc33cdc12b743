// SPDX-License-Identifier: Apache-2.0

package link

// What pods share stays when they go: the node has few, and the next pod finds
// them there. An uninstall takes them.

import (
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/netns"
)

// Shared are the links that were made for pods to share: bridges by their mark, since one of
// any name may have been there before; and shims, by their mark too, or, where an earlier version
// made them without, by name and kind. Records of pods tell of neither once the node is drained.
func Shared() (out []netlink.Link, err error) {
	all, err := netns.Links()
	if err != nil {
		return nil, err
	}
	names := make(map[int]string)
	for _, l := range all {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, l := range all {
		a, mode := l.Attrs(), subMode(l)
		bridge := l.Type() == "bridge" && (a.Group == linkGroup || unmarked(l))
		ours := a.Group == linkGroup && a.Alias == "" // a user's that is lent to a pod has an alias
		shim := HasShim(mode) && a.NetNsID < 0 && (ours || a.Name == ShimName(mode, names[a.ParentIndex]))
		if bridge || shim {
			out = append(out, l)
		}
	}
	return out, nil
}

// unmarked says whether a bridge is as earlier versions made theirs, before these had a mark.
// One that somebody else made under that name watches who is in which group, as all do by
// default.
func unmarked(br netlink.Link) bool {
	b, ok := br.(*netlink.Bridge)
	return ok && b.Name == DefaultBridge && b.MulticastSnooping != nil && !*b.MulticastSnooping
}
