// SPDX-License-Identifier: Apache-2.0

package datapath

// Programs on the node's own devices: its NICs and the tunnel's.

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
	"github.com/mustang-net/mustang/internal/state"
)

// wireHook is a place for a program on one of the node's devices.
type wireHook struct {
	pin     string // the first part of its pin's name
	program string
	ingress bool
	spec    func() (*ebpf.CollectionSpec, error)
	// priority is a filter's. Ours are below anybody's: a foreign filter, which has
	// a smaller number, sees a packet before we send it on.
	priority  uint16
	first     bool           // before all that is there
	constants map[string]any // of bpf/config.h
	calls     nodeProgram    // what the program calls when there is something to do
}

// nodeProgram is one that others call by its slot of mst_node_programs.
type nodeProgram struct {
	name string // "": none
	slot uint32
}

var (
	netdevIn = wireHook{pin: "netdev-in", program: bpfgen.NetdevProgFromNetdev, ingress: true, spec: netdevSpec, priority: 49000,
		calls: nodeProgram{bpfgen.NetdevProgNetdevIn, bpfgen.NodeProgNetdevIn}}
	overlayIn = wireHook{pin: "overlay-in", program: bpfgen.OverlayProgFromOverlay, ingress: true, spec: overlaySpec, priority: 49000, first: true}
	// What overlayIn lets pass: answers, and other nodes' pods that use this node's ports.
	overlayEdge = wireHook{pin: "overlay-edge", program: bpfgen.EdgeProgFromOutside, ingress: true, spec: edgeSpec, priority: 49001,
		constants: map[string]any{bpfgen.EdgeVarFromTunnel: uint8(1)}, calls: nodeProgram{bpfgen.EdgeProgEdgeIn, bpfgen.NodeProgEdgeInTunnel}}
	overlayOut  = wireHook{pin: "overlay-out", program: bpfgen.OverlayProgToOverlay, spec: overlaySpec, priority: 49000}
	overlayTurn = wireHook{pin: "overlay-turn", program: bpfgen.EdgeProgToOutside, spec: edgeSpec, priority: 48999, first: true,
		calls: nodeProgram{bpfgen.EdgeProgEdgeOut, bpfgen.NodeProgEdgeOut}}
	wireHooks = []wireHook{netdevIn, overlayIn, overlayEdge, overlayOut, overlayTurn}

	// At the outer end of the door (bpf/lib/edge.h).
	doorIn = wireHook{pin: "door-in", program: bpfgen.EdgeProgFromOutside, ingress: true, spec: edgeSpec, priority: 49000,
		constants: map[string]any{bpfgen.EdgeVarFromDoor: uint8(1)}, calls: nodeProgram{bpfgen.EdgeProgEdgeIn, bpfgen.NodeProgEdgeInDoor}}
	// Where datagrams come back that were put together (bpf/lib/frag.h).
	gatherIn = wireHook{pin: "gather-in", program: bpfgen.EdgeProgFromGather, ingress: true, spec: edgeSpec, priority: 49000}
)

func (d *Datapath) wirePin(h wireHook, ifindex int) string {
	return filepath.Join(d.dir, linksDir, fmt.Sprintf("%s-%d", h.pin, ifindex))
}

// SyncWire puts the programs on exactly these devices of the calling thread's
// namespace: those to other nodes, and the tunnel's, 0 when there is none. With
// edge, answers to clients outside come by the tunnel, and so do clients; with
// turns, answers to those leave by it that are turned back there (AttachEdge).
func (d *Datapath) SyncWire(netdevs []int, overlay int, edge, turns bool) error {
	wanted := map[wirePlace]bool{}
	for _, i := range netdevs {
		wanted[wirePlace{netdevIn.pin, i}] = true
	}
	if overlay != 0 {
		for _, h := range overlayHooks(edge, turns) {
			wanted[wirePlace{h.pin, overlay}] = true
		}
	}
	var errs []error
	for _, at := range d.wirePlaces(wireHooks...) {
		if !wanted[at] {
			errs = append(errs, detachPin(filepath.Join(d.dir, linksDir, at.String())))
		}
	}
	errs = append(errs, removeWireFilters(wanted))
	for _, h := range wireHooks {
		for at := range wanted {
			if at.pin == h.pin && h.pin != netdevIn.pin {
				errs = append(errs, d.attachWire(h, at.ifindex))
			}
		}
	}
	return errors.Join(append(errs, d.syncNICs(netdevs))...)
}

// overlayHooks are those at the tunnel's device (SyncWire).
func overlayHooks(edge, turns bool) []wireHook {
	out := []wireHook{overlayIn, overlayOut}
	if edge {
		out = append(out, overlayEdge)
	}
	if turns {
		out = append(out, overlayTurn)
	}
	return out
}

// OverlayCarries says whether the tunnel's device has the programs that SyncWire puts there.
func (d *Datapath) OverlayCarries(overlay int, edge, turns bool) (bool, error) {
	l, err := netlink.LinkByIndex(overlay)
	if err != nil {
		return false, fmt.Errorf("look up device %d: %w", overlay, err)
	}
	for _, h := range overlayHooks(edge, turns) {
		alive, err := pinHolds(d.wirePin(h, overlay), overlay)
		if err != nil {
			return false, err
		}
		filters, _ := netns.Filters(l, h.parent()) // without a qdisc there are none
		if !alive && !slices.ContainsFunc(filters, h.owns) {
			return false, nil
		}
	}
	return true, nil
}

// syncNICs puts the NIC's program on exactly these devices. Where the edge is, too,
// and nobody else's filter has to come first, one program is both.
func (d *Datapath) syncNICs(netdevs []int) error {
	edges, err := d.Edges()
	turns, noTurns := d.Turns()
	if err := errors.Join(err, noTurns); err != nil {
		return err
	}
	var errs []error
	for _, i := range edges {
		both, err := d.isWireToo(i)
		if err == nil && both && !slices.Contains(netdevs, i) {
			err = d.attachEdge(i, slices.Contains(turns, i), false)
		}
		errs = append(errs, err)
	}
	for _, i := range netdevs {
		if slices.Contains(edges, i) && d.AttachKind() == AttachTCX {
			errs = append(errs, d.joinNIC(i, slices.Contains(turns, i)))
		} else {
			errs = append(errs, d.attachWire(netdevIn, i))
		}
	}
	return errors.Join(errs...)
}

// joinNIC has one program at a NIC that has the edge.
func (d *Datapath) joinNIC(ifindex int, turns bool) error {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Errorf("look up device %d: %w", ifindex, err)
	}
	both, err := d.isWireToo(ifindex)
	if err != nil {
		return err
	}
	if foreignFilters(l, netdevIn) {
		err := d.attachWire(netdevIn, ifindex)
		if err == nil && both {
			err = d.attachEdge(ifindex, turns, false)
		}
		return err
	}
	if !both {
		if err := d.attachEdge(ifindex, turns, true); err != nil {
			return err
		}
	}
	return errors.Join(detachPin(d.wirePin(netdevIn, ifindex)), removeWireFilter(l, netdevIn))
}

// SyncDoor puts the edge's program at the door's outer end, by ifindex, and
// nowhere else; 0: there is no door.
func (d *Datapath) SyncDoor(outer int) error { return d.syncOnly(doorIn, outer) }

// SyncGather is SyncDoor for the program at the device by which datagrams come back.
func (d *Datapath) SyncGather(ifindex int) error { return d.syncOnly(gatherIn, ifindex) }

// syncOnly puts a program at one device alone, 0: at none.
func (d *Datapath) syncOnly(h wireHook, ifindex int) error {
	var errs []error
	for _, at := range d.wirePlaces(h) {
		if at.ifindex != ifindex {
			errs = append(errs, detachPin(filepath.Join(d.dir, linksDir, at.String())))
		}
	}
	if ifindex != 0 {
		errs = append(errs, d.attachWire(h, ifindex))
	}
	return errors.Join(errs...)
}

// EnsureWire loads what packets from the wire are handed to.
func (d *Datapath) EnsureWire() error {
	if err := d.EnsurePrograms(state.Endpoint{}); err != nil {
		return err
	}
	return d.ensureVariant(wireVariant)
}

// wirePlace is a hook at a device.
type wirePlace struct {
	pin     string
	ifindex int
}

func (p wirePlace) String() string { return fmt.Sprintf("%s-%d", p.pin, p.ifindex) }

// wirePlaces are those of hooks that have a pinned link.
func (d *Datapath) wirePlaces(hooks ...wireHook) []wirePlace {
	var out []wirePlace
	for _, h := range hooks {
		pins, _ := filepath.Glob(filepath.Join(d.dir, linksDir, h.pin+"-*")) // only a bad pattern fails
		for _, pin := range pins {
			index, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(pin), h.pin+"-"))
			if err == nil {
				out = append(out, wirePlace{h.pin, index})
			}
		}
	}
	return out
}

// attachWire attaches last: foreign programs stay in place and see the packet first.
func (d *Datapath) attachWire(h wireHook, ifindex int) error {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Errorf("look up device %d: %w", ifindex, err)
	}
	filter := d.NoTCX || !Probe().TCX || foreignFilters(l, h)
	alive, err := d.wireAlive(h, ifindex)
	if err != nil {
		return err
	}
	if alive && !filter {
		return removeWireFilter(l, h) // a call that made the link may have been killed before it took that away
	}
	p, err := d.loadWire(h)
	if err != nil {
		return err
	}
	defer p.Close()
	if filter {
		// tcx comes before filters: from there we would take packets away from them.
		return errors.Join(putFilter(ifindex, h.parent(), h.priority, h.filterName(), p), detachPin(d.wirePin(h, ifindex)))
	}
	at := ebpf.AttachTCXEgress
	if h.ingress {
		at = ebpf.AttachTCXIngress
	}
	anchor := link.Tail()
	if h.first {
		anchor = link.Head()
	}
	held, err := link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: p, Attach: at, Anchor: anchor})
	if err != nil {
		return fmt.Errorf("attach %s to %s: %w", h.program, l.Attrs().Name, err)
	}
	defer held.Close()
	if err := held.Pin(d.wirePin(h, ifindex)); err != nil {
		return fmt.Errorf("pin link of %s: %w", l.Attrs().Name, err)
	}
	return removeWireFilter(l, h) // of the time when somebody else's was there
}

// wireAlive says whether the pinned link holds its device; one that does not is
// removed.
func (d *Datapath) wireAlive(h wireHook, ifindex int) (bool, error) {
	pin := d.wirePin(h, ifindex)
	alive, err := pinHolds(pin, ifindex)
	if err != nil || alive {
		return alive, err
	}
	return false, detachPin(pin)
}

// pinHolds says whether a pinned link holds the device that has this ifindex, which
// may be another's by now.
func pinHolds(pin string, ifindex int) (bool, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open link %s: %w", pin, err)
	}
	defer l.Close()
	at, _, err := linkIfIndex(l)
	return err == nil && at == ifindex, nil
}

func (d *Datapath) loadWire(h wireHook) (*ebpf.Program, error) {
	if h.program == bpfgen.EdgeProgFromOutside {
		if err := d.ensureVariant(edgeVariant); err != nil {
			return nil, err
		}
	}
	parsed, err := h.spec()
	if err != nil {
		return nil, err
	}
	spec := parsed.Copy()
	for name := range spec.Programs {
		if name != h.program && name != h.calls.name {
			delete(spec.Programs, name)
		}
	}
	if err := setConstants(spec, h.constants); err != nil {
		return nil, err
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: d.replacements(spec)})
	if err != nil {
		return nil, loadError("program "+h.program, err)
	}
	defer coll.Close()
	if h.calls.name != "" {
		if err := d.installNodeProgram(h.calls, coll.Programs[h.calls.name]); err != nil {
			return nil, err
		}
	}
	return coll.DetachProgram(h.program), nil
}

// installNodeProgram puts a program where others call it.
func (d *Datapath) installNodeProgram(n nodeProgram, p *ebpf.Program) error {
	table, err := d.table(bpfgen.NetdevMapMstNodeProgramsV1)
	if err != nil {
		return err
	}
	if err := table.Put(n.slot, p); err != nil {
		return fmt.Errorf("install %s: %w", n.name, err)
	}
	return nil
}

// upgradeWire puts this binary's programs behind the links that exist, and in the
// place of the filters where there are none.
func (d *Datapath) upgradeWire() error {
	hooks := append([]wireHook{doorIn, gatherIn}, wireHooks...)
	filtered, err := wireFilters(hooks...)
	if err != nil {
		return err
	}
	for _, h := range hooks {
		for _, at := range d.wirePlaces(h) {
			if err := d.replaceWire(h, at); err != nil {
				return err
			}
		}
		for _, l := range filtered[h.pin] {
			if err := d.replaceWireFilter(h, l); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *Datapath) replaceWireFilter(h wireHook, l netlink.Link) error {
	p, err := d.loadWire(h)
	if err != nil {
		return err
	}
	defer p.Close()
	return ignoreGone(putFilter(l.Attrs().Index, h.parent(), h.priority, h.filterName(), p))
}

func (d *Datapath) replaceWire(h wireHook, at wirePlace) error {
	p, err := d.loadWire(h)
	if err != nil {
		return err
	}
	defer p.Close()
	l, err := link.LoadPinnedLink(d.wirePin(h, at.ifindex), nil)
	if err != nil {
		return fmt.Errorf("open link %s: %w", at, err)
	}
	defer l.Close()
	if err := ignoreGone(l.Update(p)); err != nil {
		return fmt.Errorf("replace %s of %s: %w", h.program, at, err)
	}
	return nil
}

func (h wireHook) parent() uint32 {
	if h.ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}

func (h wireHook) filterName() string { return filterPrefix + h.pin }

func (h wireHook) owns(f netlink.Filter) bool {
	b, ok := f.(*netlink.BpfFilter)
	return ok && b.Name == h.filterName()
}

// wireFilters are the devices that have hooks' filters, by the hook's pin.
func wireFilters(hooks ...wireHook) (map[string][]netlink.Link, error) {
	links, err := netns.Links()
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	out := map[string][]netlink.Link{}
	for _, l := range links {
		for _, h := range hooks {
			filters, _ := netns.Filters(l, h.parent()) // without a qdisc there are none
			if slices.ContainsFunc(filters, h.owns) {
				out[h.pin] = append(out[h.pin], l)
			}
		}
	}
	return out, nil
}

// foreignFilters says whether somebody else's filters are at the hook.
func foreignFilters(l netlink.Link, h wireHook) bool {
	filters, _ := netns.Filters(l, h.parent()) // without a qdisc there are none
	for _, f := range filters {
		if !h.owns(f) {
			return true
		}
	}
	return false
}

// removeWireFilters removes our filters from devices that are not to have one.
// The qdisc stays: it is empty, and may be another's by now.
func removeWireFilters(wanted map[wirePlace]bool) error {
	links, err := netns.Links()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	var errs []error
	for _, l := range links {
		for _, h := range wireHooks {
			if !wanted[wirePlace{h.pin, l.Attrs().Index}] {
				errs = append(errs, removeWireFilter(l, h))
			}
		}
	}
	return errors.Join(errs...)
}

func removeWireFilter(l netlink.Link, h wireHook) error {
	var errs []error
	filters, _ := netns.Filters(l, h.parent()) // without a qdisc there are none
	for _, f := range filters {
		if h.owns(f) {
			errs = append(errs, ignoreGone(netlink.FilterDel(f)))
		}
	}
	return errors.Join(errs...)
}

// WireDevices are the ifindexes of the devices that carry the NIC's program.
func (d *Datapath) WireDevices() []int {
	var out []int
	edges, _ := d.Edges()
	for _, i := range edges {
		if both, err := d.isWireToo(i); err == nil && both {
			out = append(out, i)
		}
	}
	for _, at := range d.wirePlaces(netdevIn) {
		if alive, err := pinHolds(d.wirePin(netdevIn, at.ifindex), at.ifindex); err == nil && alive {
			out = append(out, at.ifindex)
		}
	}
	filtered, _ := wireFilters(netdevIn)
	for _, l := range filtered[netdevIn.pin] {
		out = append(out, l.Attrs().Index)
	}
	return out
}
