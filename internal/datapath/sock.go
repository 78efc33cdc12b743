// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// sockHook is one cgroup hook of the socket programs.
type sockHook struct {
	name   string
	attach ebpf.AttachType
}

// What frees comes first, before what takes.
var sockHooks = []sockHook{
	{"release", ebpf.AttachCgroupInetSockRelease},
	{"connect4", ebpf.AttachCGroupInet4Connect},
	{"connect6", ebpf.AttachCGroupInet6Connect},
	{"sendmsg4", ebpf.AttachCGroupUDP4Sendmsg},
	{"sendmsg6", ebpf.AttachCGroupUDP6Sendmsg},
	{"recvmsg4", ebpf.AttachCGroupUDP4Recvmsg},
	{"recvmsg6", ebpf.AttachCGroupUDP6Recvmsg},
	{"getpeername4", ebpf.AttachCgroupInet4GetPeername},
	{"getpeername6", ebpf.AttachCgroupInet6GetPeername},
}

func (d *Datapath) sockPin(h sockHook) string {
	return filepath.Join(d.dir, linksDir, "sock-"+h.name)
}

// EnsureSock attaches the socket programs to the cgroup directory that root
// names, unless all of them are attached. Sockets of other namespaces are left alone by the
// programs themselves (mst_netns).
func (d *Datapath) EnsureSock(root func() (string, error)) error {
	// They come together and go with their cgroup together: where all are
	// pinned, one of them speaks for all.
	if alive, err := d.allSockPinned(); err != nil || alive {
		return err
	}
	var missing []sockHook
	for _, h := range sockHooks {
		alive, err := d.sockAlive(h)
		if err != nil {
			return err
		}
		if !alive {
			missing = append(missing, h)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	dir, err := root()
	if err != nil {
		return err
	}
	coll, err := d.loadSock()
	if err != nil {
		return err
	}
	defer coll.Close()
	for _, h := range missing {
		if err := d.attachSock(dir, h, coll, d.sockPin(h)); err != nil {
			return err
		}
	}
	return nil
}

// MoveSock attaches the socket programs anew, if they are attached to another cgroup directory than root names, as before
// that setting changed. For a moment a socket may meet both: what the first has translated is no Service's to the second.
func (d *Datapath) MoveSock(root func() (string, error)) (moved bool, err error) {
	if all, err := d.allSockPinned(); err != nil || !all {
		return false, err // EnsureSock attaches the others
	}
	dir, err := root()
	if err != nil {
		return false, err
	}
	var stat unix.Stat_t
	if err := unix.Stat(dir, &stat); err != nil {
		return false, fmt.Errorf("look at cgroup %s: %w", dir, err)
	}
	var coll *ebpf.Collection
	for _, h := range sockHooks {
		here, err := d.sockAt(h)
		if err != nil {
			return moved, err
		}
		if here == stat.Ino { // which is a cgroup's number
			continue
		}
		if coll == nil {
			if coll, err = d.loadSock(); err != nil {
				return moved, err
			}
			defer coll.Close()
		}
		next := d.sockPin(h) + "-next"
		if err := errors.Join(removePin(next), d.attachSock(dir, h, coll, next)); err != nil {
			return moved, err
		}
		if err := os.Rename(next, d.sockPin(h)); err != nil {
			return moved, fmt.Errorf("move link of %s: %w", h.name, err)
		}
		moved = true
	}
	return moved, nil
}

func (d *Datapath) allSockPinned() (bool, error) {
	for _, h := range sockHooks {
		if _, err := os.Lstat(d.sockPin(h)); err != nil {
			return false, nil
		}
	}
	return d.sockAlive(sockHooks[len(sockHooks)-1])
}

// SockAttached says whether the programs that lead sockets of a family to backends are attached.
// It changes nothing.
func (d *Datapath) SockAttached(v4 bool) (bool, error) {
	leads := []ebpf.AttachType{ebpf.AttachCGroupInet6Connect, ebpf.AttachCGroupUDP6Sendmsg}
	if v4 {
		leads = []ebpf.AttachType{ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupUDP4Sendmsg}
	}
	for _, h := range sockHooks {
		if !slices.Contains(leads, h.attach) {
			continue
		}
		if attached, err := d.sockAttached(h); err != nil || !attached {
			return false, err
		}
	}
	return true, nil
}

// sockAttached says whether the hook's link is attached: one stays pinned when its cgroup goes.
func (d *Datapath) sockAttached(h sockHook) (bool, error) {
	at, err := d.sockAt(h)
	return at != 0, err
}

// sockAt is the number of the cgroup that the hook's link is attached to; 0: none.
func (d *Datapath) sockAt(h sockHook) (uint64, error) {
	l, err := link.LoadPinnedLink(d.sockPin(h), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open link of %s: %w", h.name, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil {
		return 0, nil
	}
	return info.Cgroup().CgroupId, nil
}

// sockAlive is sockAttached; the pin of a link whose cgroup is gone is removed.
func (d *Datapath) sockAlive(h sockHook) (bool, error) {
	attached, err := d.sockAttached(h)
	if err != nil || attached {
		return attached, err
	}
	return false, removePin(d.sockPin(h))
}

func (d *Datapath) loadSock() (*ebpf.Collection, error) {
	parsed, err := sockSpec()
	if err != nil {
		return nil, err
	}
	spec := parsed.Copy()
	if err := setConstants(spec, nil); err != nil {
		return nil, err
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: d.replacements(spec)})
	if err != nil {
		return nil, loadError("socket programs", err)
	}
	return coll, nil
}

func sockProgram(coll *ebpf.Collection, h sockHook) (*ebpf.Program, error) {
	if p := coll.Programs["mst_"+h.name]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("the socket object has no program mst_%s", h.name)
}

func (d *Datapath) attachSock(root string, h sockHook, coll *ebpf.Collection, pin string) error {
	p, err := sockProgram(coll, h)
	if err != nil {
		return err
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: root, Attach: h.attach, Program: p})
	if err != nil {
		return fmt.Errorf("attach %s to %s: %w; --cgroup-root must be a directory of a cgroup2 mount", h.name, root, err)
	}
	defer l.Close()
	if err := l.Pin(pin); err != nil {
		return fmt.Errorf("pin link of %s: %w", h.name, err)
	}
	return nil
}

// upgradeSock puts this binary's programs behind the links that exist.
func (d *Datapath) upgradeSock() error {
	var coll *ebpf.Collection
	for _, h := range sockHooks {
		l, err := link.LoadPinnedLink(d.sockPin(h), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open link of %s: %w", h.name, err)
		}
		defer l.Close()
		if coll == nil {
			if coll, err = d.loadSock(); err != nil {
				return err
			}
			defer coll.Close()
		}
		p, err := sockProgram(coll, h)
		if err != nil {
			return err
		}
		if err := ignoreGone(l.Update(p)); err != nil { // with its directory: EnsureSock attaches anew
			return fmt.Errorf("replace %s: %w", h.name, err)
		}
	}
	return nil
}

func (d *Datapath) sockPrograms() ([]ProgramInfo, error) {
	var out []ProgramInfo
	for _, h := range sockHooks {
		l, err := link.LoadPinnedLink(d.sockPin(h), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("open link of %s: %w", h.name, err)
		}
		info, err := l.Info()
		l.Close()
		if err != nil {
			return nil, fmt.Errorf("describe link of %s: %w", h.name, err)
		}
		p, err := describe("mst_"+h.name, "cgroup "+h.name, info.Program)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}
