// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/state"
)

// How an endpoint's programs are held at their interface.
const (
	AttachTCX    = state.AttachTCX
	AttachClsact = state.AttachClsact
	AttachNetkit = state.AttachNetkit
)

// hook is one of an endpoint's two attachments.
type hook struct {
	name    string // "from" or "to", as the pod sees it
	slot    uint32
	ingress bool // of the interface that it is attached to; with netkit: at the peer's transmission
}

// hooks are where an endpoint's programs go: what leaves a pod comes in at the
// host's end of its pair, and goes out of the pod's own interface.
func hooks(ep state.Endpoint) [2]hook {
	v := variantOf(ep)
	hostEnd := ep.Placement != state.InPod
	return [2]hook{{"from", v.fromPod, hostEnd}, {"to", v.toPod, !hostEnd}}
}

// isOn says whether a link on this ifindex is h's of ep. A netkit link at the
// peer's transmission says the peer's, which is in the pod; where that was lost
// with the store, whatever holds the pin is right.
func (h hook) isOn(ifindex int, ep state.Endpoint) bool {
	if ep.Attach == AttachNetkit && h.ingress {
		return ifindex != 0 && (ifindex == ep.PodIndex || ep.PodIndex == 0)
	}
	return ifindex == ep.IfIndex
}

func (d *Datapath) linkPin(endpoint uint32, name string) string {
	return filepath.Join(d.dir, linksDir, fmt.Sprintf("ep-%d-%s", endpoint, name))
}

// AttachKind is what Attach will use on this kernel.
func (d *Datapath) AttachKind() string {
	if d.NoTCX {
		return AttachClsact
	}
	// A link that is there answers as well as the kernel, and sooner.
	if linked, err := d.LinkedEndpoints(); err == nil && len(linked) > 0 || Probe().TCX {
		return AttachTCX
	}
	return AttachClsact
}

// Attach puts the entry programs of ep on its interface. The calling thread is
// in the interface's namespace. What is attached already stays.
//
// With tcx we go to the head of the list: a foreign program that ends the
// processing early must not be able to skip ours.
func (d *Datapath) Attach(ep state.Endpoint) error {
	if err := d.attachHooks(ep); err != nil {
		return fmt.Errorf("attach to interface %d: %w", ep.IfIndex, err)
	}
	return nil
}

func (d *Datapath) attachHooks(ep state.Endpoint) error {
	if ep.Attach == AttachClsact {
		return d.attachFilters(ep)
	}
	for _, h := range hooks(ep) {
		if err := d.attachLink(ep, h); err != nil {
			return err
		}
	}
	return nil
}

// attachLink attaches by a bpf_link: at a tc hook by tcx, or at netkit's own.
func (d *Datapath) attachLink(ep state.Endpoint, h hook) error {
	alive, err := d.linkAlive(ep, h)
	if err != nil || alive {
		return err
	}
	prog, err := d.entryProgram(ep.ID, h.slot)
	if err != nil {
		return err
	}
	defer prog.Close()
	create := createTCX
	if ep.Attach == AttachNetkit {
		create = createNetkit
	}
	l, err := create(ep.IfIndex, h, prog)
	if err != nil {
		return err
	}
	// Until it is pinned the link dies with this process, and the interface is
	// as it was.
	defer l.Close()
	if err := l.Pin(d.linkPin(ep.ID, h.name)); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

func createTCX(ifindex int, h hook, prog *ebpf.Program) (link.Link, error) {
	attach := ebpf.AttachTCXEgress
	if h.ingress {
		attach = ebpf.AttachTCXIngress
	}
	return link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: prog, Attach: attach, Anchor: link.Head()})
}

// createNetkit attaches to a netkit pair by its primary end: what the pod sends
// is what the peer transmits.
func createNetkit(ifindex int, h hook, prog *ebpf.Program) (link.Link, error) {
	attach := ebpf.AttachNetkitPrimary
	if h.ingress {
		attach = ebpf.AttachNetkitPeer
	}
	return link.AttachNetkit(link.NetkitOptions{Interface: ifindex, Program: prog, Attach: attach, Anchor: link.Head()})
}

// linkIfIndex is where a link of ours is attached, 0 when its interface is gone.
func linkIfIndex(l link.Link) (ifindex int, kind string, err error) {
	info, err := l.Info()
	if err != nil {
		return 0, "", fmt.Errorf("describe link: %w", err)
	}
	if i := info.TCX(); i != nil {
		return int(i.Ifindex), AttachTCX, nil
	}
	if i := info.Netkit(); i != nil {
		return int(i.Ifindex), AttachNetkit, nil
	}
	return 0, "", nil
}

// linkAlive says whether ep's pinned link holds its interface. The pin of a
// link whose interface is gone is removed.
func (d *Datapath) linkAlive(ep state.Endpoint, h hook) (bool, error) {
	pin := d.linkPin(ep.ID, h.name)
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open link: %w", err)
	}
	defer l.Close()
	if ifindex, kind, err := linkIfIndex(l); err == nil && kind == ep.Attach && h.isOn(ifindex, ep) {
		return true, nil
	}
	return false, errors.Join(ignoreGone(l.Detach()), removePin(pin))
}

// upgradeEntries replaces the entry programs behind links. Those behind filters stay for
// as long as their pods live: they only call, or find no voucher that they know.
func (d *Datapath) upgradeEntries() error {
	linked, err := d.LinkedEndpoints()
	if err != nil {
		return err
	}
	slots, err := d.Endpoints.All()
	if err != nil {
		return err
	}
	for id := range linked {
		slot, ok := slots[id]
		if !ok || slot.Generation == 0 {
			continue
		}
		ep := EndpointOf(id, slot)
		ep.Attach = d.LinkKind(id)
		for _, h := range hooks(ep) {
			if err := d.upgradeEntry(id, h); err != nil {
				return fmt.Errorf("replace the entry program of endpoint %d: %w", id, err)
			}
		}
	}
	return nil
}

func (d *Datapath) upgradeEntry(id uint32, h hook) error {
	l, err := link.LoadPinnedLink(d.linkPin(id, h.name), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer l.Close()
	p, err := d.entryProgram(id, h.slot)
	if err != nil {
		return err
	}
	defer p.Close()
	return ignoreGone(l.Update(p))
}

// LinkKind is how the pinned links of endpoint id are attached.
func (d *Datapath) LinkKind(id uint32) string {
	l, err := link.LoadPinnedLink(d.linkPin(id, "to"), nil)
	if err != nil {
		return AttachTCX
	}
	defer l.Close()
	if _, kind, err := linkIfIndex(l); err == nil && kind != "" {
		return kind
	}
	return AttachTCX
}

// Detach takes the links of endpoint id off, wherever they are. Absent
// ones are success.
func (d *Datapath) Detach(id uint32) error {
	var errs []error
	for _, name := range []string{"from", "to"} {
		errs = append(errs, detachPin(d.linkPin(id, name)))
	}
	return errors.Join(errs...)
}

// detachPin detaches before it unpins: a link that merely loses its last pin
// may be taken down a moment later.
func detachPin(pin string) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open link %s: %w", pin, err)
	}
	defer l.Close()
	if err := ignoreGone(l.Detach()); err != nil {
		return fmt.Errorf("detach %s: %w", pin, err)
	}
	return removePin(pin)
}

// LinkedEndpoints are the endpoints that have pinned links.
func (d *Datapath) LinkedEndpoints() (map[uint32]bool, error) {
	entries, err := os.ReadDir(filepath.Join(d.dir, linksDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list links: %w", err)
	}
	out := make(map[uint32]bool)
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), "ep-")
		number, _, _ := strings.Cut(rest, "-")
		if id, err := strconv.ParseUint(number, 10, 32); ok && err == nil {
			out[uint32(id)] = true
		}
	}
	return out, nil
}

// Remove detaches every link and unpins everything under dir, and removes dir,
// unless a bpffs is mounted there itself: then it is whoever's mounted it. It
// needs no table to be readable. A dir that is not there is success.
func Remove(dir string) error {
	var errs []error
	// Links first: a table must not vanish under an attached program's feet.
	links, _ := os.ReadDir(filepath.Join(dir, linksDir))
	for _, e := range links {
		errs = append(errs, detachPin(filepath.Join(dir, linksDir, e.Name())))
	}
	for _, sub := range []string{linksDir, programsDir, mapsDir} {
		errs = append(errs, os.RemoveAll(filepath.Join(dir, sub)))
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Idle says that the scope has neither programs nor links.
func Idle(dir string) bool {
	for _, sub := range []string{linksDir, programsDir} {
		if entries, err := os.ReadDir(filepath.Join(dir, sub)); err != nil && !errors.Is(err, fs.ErrNotExist) || len(entries) > 0 {
			return false
		}
	}
	return true
}
