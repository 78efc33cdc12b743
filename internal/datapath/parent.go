// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
)

// The tables of links whose children are pods.
type (
	Parent   = bpfgen.ParentParent
	ChildKey = bpfgen.ParentChildKey
)

const (
	parentProgram = "parent_egress"
	parentFilter  = filterPrefix + "parent"
)

// ChildOf is the key of a child of the parent with this ifindex.
func ChildOf(parent int, mac net.HardwareAddr) ChildKey {
	return ChildKey{Parent: uint32(parent), Mac: [6]uint8(mac)}
}

// OwnChildOf is the key under which routes show a child of the node's own; types.h.
func OwnChildOf(parent, child int) ChildKey {
	k := ChildKey{Parent: uint32(parent), Mac: [6]uint8{0xff, 0xff}}
	binary.NativeEndian.PutUint32(k.Mac[2:], uint32(child))
	return k
}

func (d *Datapath) parentPin(ifindex int) string {
	return filepath.Join(d.dir, linksDir, fmt.Sprintf("parent-%d", ifindex))
}

// AttachParent puts the parent program on the egress of the link with this
// ifindex, in the calling thread's namespace; one that is there stays. kind is
// AttachTCX or AttachClsact.
func (d *Datapath) AttachParent(ifindex int, kind string) error {
	alive, err := d.parentAlive(ifindex, kind)
	if err != nil || alive {
		return err
	}
	p, err := d.loadParent()
	if err != nil {
		return err
	}
	defer p.Close()
	if kind == AttachClsact {
		return putFilter(ifindex, netlink.HANDLE_MIN_EGRESS, filterPriority, parentFilter, p)
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: p, Attach: ebpf.AttachTCXEgress, Anchor: link.Head()})
	if err != nil {
		return fmt.Errorf("attach to parent interface %d: %w", ifindex, err)
	}
	defer l.Close()
	if err := l.Pin(d.parentPin(ifindex)); err != nil {
		return fmt.Errorf("pin link of parent interface %d: %w", ifindex, err)
	}
	return nil
}

// DetachParent takes the parent program off. Absent is success.
func (d *Datapath) DetachParent(ifindex int) error {
	if err := detachPin(d.parentPin(ifindex)); err != nil {
		return err
	}
	return detachParentFilter(ifindex)
}

// detachParentFilter is DetachParent for what kernels without tcx have.
func detachParentFilter(ifindex int) error {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return ignoreGone(err)
	}
	filters, err := netns.Filters(l, netlink.HANDLE_MIN_EGRESS)
	if err != nil {
		return ignoreGone(err)
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Name == parentFilter {
			return ignoreGone(netlink.FilterDel(b))
		}
	}
	return nil
}

// parentAlive says whether the program of this build is attached.
func (d *Datapath) parentAlive(ifindex int, kind string) (bool, error) {
	if kind == AttachClsact {
		return false, nil // replacing the filter is one step, and as good
	}
	l, err := link.LoadPinnedLink(d.parentPin(ifindex), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open link of parent interface %d: %w", ifindex, err)
	}
	defer l.Close()
	if info, err := l.Info(); err == nil && info.TCX() != nil && int(info.TCX().Ifindex) == ifindex {
		return true, nil
	}
	return false, errors.Join(ignoreGone(l.Detach()), removePin(d.parentPin(ifindex)))
}

// upgradeParents puts this binary's program behind the links that exist, and
// in the place of the filters where there are none.
func (d *Datapath) upgradeParents() error {
	parents, err := d.Parents.All()
	if err != nil || len(parents) == 0 {
		return err
	}
	p, err := d.loadParent()
	if err != nil {
		return err
	}
	defer p.Close()
	for ifindex := range parents {
		err := d.upgradeParent(int(ifindex), p)
		if err != nil {
			return fmt.Errorf("replace %s of interface %d: %w", parentProgram, ifindex, err)
		}
	}
	return nil
}

func (d *Datapath) upgradeParent(ifindex int, p *ebpf.Program) error {
	l, err := link.LoadPinnedLink(d.parentPin(ifindex), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return ignoreGone(putFilter(ifindex, netlink.HANDLE_MIN_EGRESS, filterPriority, parentFilter, p))
	}
	if err != nil {
		return err
	}
	defer l.Close()
	return ignoreGone(l.Update(p)) // with its device
}

func (d *Datapath) loadParent() (*ebpf.Program, error) {
	parsed, err := parentSpec()
	if err != nil {
		return nil, err
	}
	spec := parsed.Copy()
	node, err := netns.Cookie()
	if err == nil {
		err = setConstants(spec, map[string]any{bpfgen.ParentVarNodeNetns: node})
	}
	if err != nil {
		return nil, err
	}
	var p bpfgen.ParentPrograms
	if err := spec.LoadAndAssign(&p, &ebpf.CollectionOptions{MapReplacements: d.replacements(spec)}); err != nil {
		return nil, loadError("the parent link's program", err)
	}
	return p.ParentEgress, nil
}
