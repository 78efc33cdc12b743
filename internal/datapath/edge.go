// SPDX-License-Identifier: Apache-2.0

package datapath

// The programs at the node's NIC, for Services that clients outside use.

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/netns"
)

// edgeHook is one direction of a NIC.
type edgeHook struct {
	name   string
	attach ebpf.AttachType
	parent uint32
}

var (
	edgeIn    = edgeHook{"in", ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS}
	edgeOut   = edgeHook{"out", ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS}
	edgeHooks = []edgeHook{edgeOut, edgeIn} // who comes in is answered
)

const (
	edgePin    = "edge-"
	edgeFilter = filterPrefix + "edge"
	// After the parent link's filter, whose NIC it may be.
	edgePriority = filterPriority + 1
)

func (d *Datapath) edgePinOf(ifindex int, h edgeHook) string {
	return filepath.Join(d.dir, linksDir, fmt.Sprintf("%s%d-%s", edgePin, ifindex, h.name))
}

func edgeProgram(p *bpfgen.EdgePrograms, h edgeHook, wire bool) *ebpf.Program {
	switch {
	case h == edgeOut:
		return p.ToOutside
	case wire:
		return p.FromNic
	}
	return p.FromOutside
}

func (d *Datapath) loadEdge() (*bpfgen.EdgePrograms, error) {
	if err := d.ensureVariant(edgeVariant); err != nil {
		return nil, err
	}
	parsed, err := edgeSpec()
	if err != nil {
		return nil, err
	}
	spec := parsed.Copy()
	if err := setConstants(spec, nil); err != nil {
		return nil, err
	}
	var p bpfgen.EdgePrograms
	if err := spec.LoadAndAssign(&p, &ebpf.CollectionOptions{MapReplacements: d.replacements(spec)}); err != nil {
		return nil, loadError("the NIC's programs", err)
	}
	if err := errors.Join(d.installNodeProgram(nodeProgram{bpfgen.EdgeProgEdgeIn, bpfgen.NodeProgEdgeIn}, p.EdgeIn),
		d.installNodeProgram(nodeProgram{bpfgen.EdgeProgEdgeOut, bpfgen.NodeProgEdgeOut}, p.EdgeOut)); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return &p, nil
}

// AttachEdge puts the edge's programs on the NIC with this ifindex, in the calling
// thread's namespace, after what others have there; those that are attached are
// replaced by this build's. Without turns, what leaves by the NIC meets none.
func (d *Datapath) AttachEdge(ifindex int, turns bool) error {
	wire, err := d.isWireToo(ifindex)
	if err != nil {
		return err
	}
	return d.attachEdge(ifindex, turns, wire)
}

// attachEdge is AttachEdge; wire says that the NIC's program for other nodes is the
// same (bpf/edge.bpf.c).
func (d *Datapath) attachEdge(ifindex int, turns, wire bool) error {
	if wire {
		p, err := d.loadWire(netdevIn) // for what it calls
		if err != nil {
			return err
		}
		p.Close()
	}
	p, err := d.loadEdge()
	if err != nil {
		return err
	}
	defer p.Close()
	for _, h := range edgeHooks {
		if h == edgeOut && !turns {
			err = d.detachEdge(ifindex, h)
		} else if d.AttachKind() == AttachClsact {
			err = putFilter(ifindex, h.parent, edgePriority, edgeFilter, edgeProgram(p, h, false))
		} else {
			err = d.attachEdgeLink(ifindex, h, edgeProgram(p, h, wire))
		}
		if err != nil {
			return errors.Join(err, d.DetachEdge(ifindex))
		}
	}
	return nil
}

func (d *Datapath) attachEdgeLink(ifindex int, h edgeHook, p *ebpf.Program) error {
	pin := d.edgePinOf(ifindex, h)
	if l, err := link.LoadPinnedLink(pin, nil); err == nil {
		defer l.Close()
		if info, err := l.Info(); err == nil && info.TCX() != nil && int(info.TCX().Ifindex) == ifindex {
			return l.Update(p)
		}
		if err := errors.Join(ignoreGone(l.Detach()), removePin(pin)); err != nil {
			return err
		}
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: p, Attach: h.attach})
	if err != nil {
		return fmt.Errorf("attach to interface %d: %w", ifindex, err)
	}
	defer l.Close()
	if err := l.Pin(pin); err != nil {
		return fmt.Errorf("pin link of interface %d: %w", ifindex, err)
	}
	return nil
}

// isWireToo says whether the edge's program at a NIC is the one for other nodes, too.
func (d *Datapath) isWireToo(ifindex int) (bool, error) {
	l, err := link.LoadPinnedLink(d.edgePinOf(ifindex, edgeIn), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the edge's link at interface %d: %w", ifindex, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("look at the edge's link at interface %d: %w", ifindex, err)
	}
	if at := info.TCX(); at == nil || int(at.Ifindex) != ifindex {
		return false, nil // its NIC is gone
	}
	p, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return false, fmt.Errorf("open the edge's program at interface %d: %w", ifindex, err)
	}
	defer p.Close()
	of, err := p.Info()
	if err != nil {
		return false, fmt.Errorf("look at the edge's program at interface %d: %w", ifindex, err)
	}
	return of.Name == bpfgen.EdgeProgFromNic, nil
}

// DetachEdge takes the edge's programs off a NIC. Absent is success.
func (d *Datapath) DetachEdge(ifindex int) error {
	wire, err := d.isWireToo(ifindex)
	if err == nil && wire {
		err = ignoreGone(d.attachWire(netdevIn, ifindex))
	}
	if err != nil {
		return err
	}
	return d.detachEdge(ifindex, edgeHooks...)
}

func (d *Datapath) detachEdge(ifindex int, hooks ...edgeHook) error {
	var errs []error
	for _, h := range hooks {
		errs = append(errs, detachPin(d.edgePinOf(ifindex, h)))
	}
	return errors.Join(append(errs, removeEdgeFilters(ifindex, hooks...))...)
}

func removeEdgeFilters(ifindex int, hooks ...edgeHook) error {
	filters, err := edgeFilters(ifindex, hooks...)
	for _, f := range filters {
		err = errors.Join(err, ignoreGone(netlink.FilterDel(f)))
	}
	return err
}

func edgeFilters(ifindex int, hooks ...edgeHook) (out []*netlink.BpfFilter, err error) {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return nil, ignoreGone(err)
	}
	for _, h := range hooks {
		filters, err := netns.Filters(l, h.parent)
		if err := ignoreGone(err); err != nil {
			return nil, fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
		}
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok && strings.HasPrefix(b.Name, edgeFilter) {
				out = append(out, b)
			}
		}
	}
	return out, nil
}

// Edges are the NICs that have the edge's programs, by ifindex.
func (d *Datapath) Edges() ([]int, error) {
	here, _, err := d.edges(edgeIn)
	return here, err
}

// GoneEdges are those that had them and are gone, until DetachEdge. Another may have
// the number by now, and be one of Edges only when it was given them itself.
func (d *Datapath) GoneEdges() ([]int, error) {
	_, gone, err := d.edges(edgeIn)
	return gone, err
}

// Turns are the NICs of Edges and GoneEdges where what leaves meets a program, too.
func (d *Datapath) Turns() ([]int, error) {
	here, gone, err := d.edges(edgeOut)
	return append(here, gone...), err
}

// HaveTurned says whether any flow's replies were the NIC's to turn back.
func (d *Datapath) HaveTurned() (bool, error) {
	var facts bpfgen.PodFacts
	table, err := d.table(bpfgen.PodMapMstFactsV1)
	if err != nil {
		return false, err
	}
	if err := table.Lookup(uint32(0), &facts); err != nil {
		return false, fmt.Errorf("read table %s: %w", bpfgen.PodMapMstFactsV1, err)
	}
	return facts.EdgeTurn != 0, nil
}

func (d *Datapath) edges(h edgeHook) (here, gone []int, err error) {
	suffix := "-" + h.name
	pins, err := filepath.Glob(filepath.Join(d.dir, linksDir, edgePin+"*"+suffix))
	if err != nil {
		return nil, nil, err
	}
	for _, pin := range pins {
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(pin), edgePin), suffix))
		if err != nil {
			continue
		}
		holds, err := pinHolds(pin, n)
		switch {
		case err != nil:
			return nil, nil, err
		case holds:
			here = append(here, n)
		default:
			gone = append(gone, n)
		}
	}
	filtered, err := d.filteredEdges(h)
	here = append(here, filtered...)
	slices.Sort(here)
	return slices.Compact(here), gone, err
}

// filteredEdges are those of kernels without tcx.
func (d *Datapath) filteredEdges(h edgeHook) (out []int, err error) {
	if d.AttachKind() != AttachClsact {
		return nil, nil
	}
	links, err := netns.Links()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		filters, err := edgeFilters(l.Attrs().Index, h)
		if err != nil {
			return nil, err
		}
		if len(filters) > 0 {
			out = append(out, l.Attrs().Index)
		}
	}
	return out, nil
}

// upgradeEdges puts this binary's programs in the place of those attached.
func (d *Datapath) upgradeEdges() error {
	list, err := d.Edges()
	turns, noTurns := d.Turns()
	err = errors.Join(err, noTurns)
	for _, ifindex := range list {
		err = errors.Join(err, d.AttachEdge(ifindex, slices.Contains(turns, ifindex)))
	}
	return err
}
