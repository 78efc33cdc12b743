// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// Our filters' place: first, under a handle that nobody picks by accident.
// Filters of others are never touched.
const (
	filterPriority = 1
	filterHandle   = 0x6d7374 // "mst"
	filterPrefix   = "mustang:"
)

func filterName(id uint32, h hook) string { return fmt.Sprintf("%s%d:%s", filterPrefix, id, h.name) }

func parentOf(h hook) uint32 {
	if h.ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}

// putFilter attaches p to one of the node's own devices, in place of the filter of
// ours that may be there: one message to the kernel, so no packet meets a gap. The
// calling thread is in the device's namespace.
func putFilter(ifindex int, parent uint32, priority uint16, name string, p *ebpf.Program) error {
	if err := netlink.QdiscAdd(clsact(ifindex)); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add clsact qdisc to %s: %w", deviceName(ifindex), err)
	}
	err := netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: parent, Handle: filterHandle, Protocol: unix.ETH_P_ALL, Priority: priority,
		},
		Fd: p.FD(), Name: name, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("add filter %s to %s: %w", name, deviceName(ifindex), err)
	}
	return nil
}

// deviceName is for errors, whatever has become of the device.
func deviceName(ifindex int) string {
	if l, err := netlink.LinkByIndex(ifindex); err == nil {
		return l.Attrs().Name
	}
	return fmt.Sprintf("interface %d", ifindex)
}

// HasClsact says whether the interface has a clsact qdisc. The calling thread
// is in its namespace.
func HasClsact(ifindex int) (bool, error) {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return false, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	list, err := netns.Qdiscs(l)
	if err != nil {
		return false, fmt.Errorf("list qdiscs of %s: %w", l.Attrs().Name, err)
	}
	for _, q := range list {
		if q.Type() == "clsact" {
			return true, nil
		}
	}
	return false, nil
}

// HasFilters says whether a filter of ep's is on its interface. The calling
// thread is in the interface's namespace.
func HasFilters(ep state.Endpoint) bool {
	l, err := netlink.LinkByIndex(ep.IfIndex)
	if err != nil {
		return false
	}
	for _, h := range hooks(ep) {
		filters, _ := netns.Filters(l, parentOf(h))
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok && strings.HasPrefix(b.Name, filterName(ep.ID, h)) {
				return true
			}
		}
	}
	return false
}

// attachFilters attaches without links.
func (d *Datapath) attachFilters(ep state.Endpoint) error {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	if err := nl.QdiscAdd(clsact(ep.IfIndex)); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add clsact qdisc: %w", err)
	}
	for _, h := range hooks(ep) {
		if err := d.attachFilter(nl, ep, h); err != nil {
			return err
		}
	}
	return nil
}

func (d *Datapath) attachFilter(nl *netlink.Handle, ep state.Endpoint, h hook) error {
	prog, err := d.filterProgram(h.slot)
	if err != nil {
		return err
	}
	defer prog.Close()
	// Replace is one message to the kernel, so a filter left by a killed tool
	// goes over into this one without a gap.
	err = nl.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ep.IfIndex,
			Parent:    parentOf(h),
			Handle:    filterHandle,
			Protocol:  unix.ETH_P_ALL,
			Priority:  filterPriority,
		},
		ClassId:      ep.ID,
		Fd:           int(prog.Fd()),
		Name:         filterName(ep.ID, h),
		DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("add filter: %w", err)
	}
	return nil
}

// DetachFilters takes the filters of ep off its interface, and the qdisc when
// it was made for them and nobody else uses it. The calling thread is in the
// interface's namespace. Absent filters, or an absent interface, are success.
func DetachFilters(ep state.Endpoint) error {
	l, err := netlink.LinkByIndex(ep.IfIndex)
	if err != nil {
		return ignoreGone(err)
	}
	left := 0
	for _, h := range hooks(ep) {
		filters, err := netns.Filters(l, parentOf(h))
		if err != nil {
			return fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
		}
		for _, f := range filters {
			b, ok := f.(*netlink.BpfFilter)
			if !ok || !strings.HasPrefix(b.Name, filterName(ep.ID, h)) {
				left++
				continue
			}
			if err := ignoreGone(netlink.FilterDel(b)); err != nil {
				return fmt.Errorf("remove filter from %s: %w", l.Attrs().Name, err)
			}
		}
	}
	if !ep.Qdisc || left > 0 {
		return nil
	}
	if err := ignoreGone(netlink.QdiscDel(clsact(ep.IfIndex))); err != nil {
		return fmt.Errorf("remove clsact qdisc from %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// DetachAllFilters takes all of ours off an interface of the calling thread's namespace,
// whoever may have recorded what they are. The qdisc stays: it is empty, and may be
// another's by now.
func DetachAllFilters(l netlink.Link) error {
	var errs []error
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, _ := netns.Filters(l, parent) // without a qdisc there are none
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok && strings.HasPrefix(b.Name, filterPrefix) {
				errs = append(errs, ignoreGone(netlink.FilterDel(b)))
			}
		}
	}
	return errors.Join(errs...)
}

func clsact(ifindex int) netlink.Qdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: ifindex,
			Handle:    netlink.MakeHandle(0xffff, 0),
			Parent:    netlink.HANDLE_CLSACT,
		},
		QdiscType: "clsact",
	}
}

// ignoreGone turns "it is not there" into success.
func ignoreGone(err error) error {
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) ||
		errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOLINK) {
		return nil
	}
	return err
}
