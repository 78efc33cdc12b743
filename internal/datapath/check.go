// SPDX-License-Identifier: Apache-2.0

package datapath

// Is an endpoint's attachment whole?

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// Attached says whether both programs of ep hold its interface. With clsact
// the calling thread is in the interface's namespace.
func (d *Datapath) Attached(ep state.Endpoint) (bool, error) {
	for _, h := range hooks(ep) {
		check := d.linkHolds
		if ep.Attach == AttachClsact {
			check = filterHolds
		}
		if ok, err := check(ep, h); err != nil || !ok {
			return false, err
		}
	}
	return true, nil
}

func (d *Datapath) linkHolds(ep state.Endpoint, h hook) (bool, error) {
	l, err := link.LoadPinnedLink(d.linkPin(ep.ID, h.name), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open link: %w", err)
	}
	defer l.Close()
	ifindex, kind, err := linkIfIndex(l)
	return err == nil && kind == ep.Attach && h.isOn(ifindex, ep), err
}

func filterHolds(ep state.Endpoint, h hook) (bool, error) {
	l, err := netlink.LinkByIndex(ep.IfIndex)
	if err != nil {
		return false, ignoreGone(err)
	}
	filters, err := netns.Filters(l, parentOf(h))
	if err != nil {
		return false, nil // no qdisc
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok && strings.HasPrefix(b.Name, filterName(ep.ID, h)) {
			return true, nil
		}
	}
	return false, nil
}

// CheckPrograms says whether the shared programs that ep's entry programs call
// are loaded.
func (d *Datapath) CheckPrograms(ep state.Endpoint) error {
	for _, h := range hooks(ep) {
		if !d.slotFilled(h.slot) {
			return fmt.Errorf("the shared program %s is not loaded: the endpoint's packets are dropped", programNames[h.slot])
		}
	}
	return nil
}
