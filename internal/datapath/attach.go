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

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// How an endpoint's programs are held at their interface.
const (
	AttachTCX    = "tcx"
	AttachClsact = "clsact"
)

// hook is one of an endpoint's two attachments.
type hook struct {
	name    string // "from" or "to", as the pod sees it
	slot    uint32
	ingress bool
}

// hooks are where an endpoint's programs go: what leaves a pod comes in at the
// host's end of its pair, and goes out of the pod's own interface.
func hooks(p state.Placement) [2]hook {
	if p == state.InPod {
		return [2]hook{{"from", bpfgen.ProgFromPodInner, false}, {"to", bpfgen.ProgToPodInner, true}}
	}
	return [2]hook{{"from", bpfgen.ProgFromPodHost, true}, {"to", bpfgen.ProgToPodHost, false}}
}

func (d *Datapath) linkPin(endpoint uint32, name string) string {
	return filepath.Join(d.dir, linksDir, fmt.Sprintf("ep-%d-%s", endpoint, name))
}

// AttachKind is what Attach will use on this kernel.
func (d *Datapath) AttachKind() string {
	if Probe().TCX && !d.NoTCX {
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
	attach := d.attachTCX
	if ep.Attach == AttachClsact {
		attach = d.attachFilter
	}
	for _, h := range hooks(ep.Placement) {
		if err := attach(ep, h); err != nil {
			return fmt.Errorf("attach to interface %d: %w", ep.IfIndex, err)
		}
	}
	return nil
}

func (d *Datapath) attachTCX(ep state.Endpoint, h hook) error {
	alive, err := d.linkAlive(ep, h)
	if err != nil || alive {
		return err
	}
	prog, err := d.entryProgram(ep.ID, h.slot)
	if err != nil {
		return err
	}
	defer prog.Close()
	attach := ebpf.AttachTCXEgress
	if h.ingress {
		attach = ebpf.AttachTCXIngress
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: ep.IfIndex, Program: prog, Attach: attach, Anchor: link.Head()})
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
	info, err := l.Info()
	if err == nil && info.TCX() != nil && int(info.TCX().Ifindex) == ep.IfIndex {
		return true, nil
	}
	return false, errors.Join(ignoreGone(l.Detach()), removePin(pin))
}

// Detach takes the tcx links of endpoint id off, wherever they are. Absent
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

// Remove detaches every link and unpins everything under dir, and removes dir.
// It needs no table to be readable. A dir that is not there is success.
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
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
