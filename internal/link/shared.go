// SPDX-License-Identifier: Apache-2.0

package link

// What pods share stays when they go: the node has few, and the next pod finds
// them there. An uninstall takes them.

import (
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/netns"
)

// Shared are the links that were made for pods to share: bridges by their mark, since a
// configured one may have been there before, or by the default name, as earlier versions made it; and shims, whose names are
// nobody else's, by name and kind. Records of pods tell of neither once the node
// is drained.
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
		bridge := l.Type() == "bridge" && (a.Group == linkGroup || a.Name == DefaultBridge)
		shim := HasShim(mode) && a.NetNsID < 0 && a.Name == ShimName(mode, names[a.ParentIndex])
		if bridge || shim {
			out = append(out, l)
		}
	}
	return out, nil
}
