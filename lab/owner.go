// SPDX-License-Identifier: Apache-2.0

package lab

// Who owns a lab, and what becomes of one whose owner is dead.
//
// A lab is a directory under rootDir. It is made before anything else of the
// lab and removed after everything else, under a lock on rootDir: so whatever
// exists of a lab, its directory exists, and says whose it is.

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const rootDir = "/run/mustang-lab"

const ownerFile = "owner.json"

// Info describes a lab that exists, dead or alive.
type Info struct {
	Name     string    `json:"name"`
	Mode     Mode      `json:"mode"`
	Services ServiceBy `json:"services"`
	PID      int       `json:"pid"`
	Start    string    `json:"start"` // of the process, in clock ticks since boot
	Boot     string    `json:"boot"`  // the kernel's boot id
	Alive    bool      `json:"alive"`
	NetNS    []string  `json:"netns"`
}

// mark is the environment variable that a lab's processes carry. Their
// children inherit it, so orphans are found too.
func (i Info) mark() string { return fmt.Sprintf("MUSTANG_LAB=%s/%d/%s", i.Name, i.PID, i.Start) }

func (i Info) dir() string { return filepath.Join(rootDir, i.Name) }

// bpf and state are a lab's two mounts: its BPF file system, and its nodes' state.
func (i Info) bpf() string   { return filepath.Join(i.dir(), "bpf") }
func (i Info) state() string { return filepath.Join(i.dir(), "state") }

func thisOwner(cfg Config) Info {
	pid := os.Getpid()
	return Info{Name: cfg.Name, Mode: cfg.Mode, Services: cfg.Services, PID: pid, Start: processStart(pid), Boot: bootID(), Alive: true}
}

func bootID() string {
	raw, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // unreadable: "" everywhere
	return strings.TrimSpace(string(raw))
}

// processStart is "" when the process is gone or only waits to be reaped.
func processStart(pid int) string {
	f := processStat(pid)
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return ""
	}
	return f[19] // field 22
}

// processStat is what /proc says of a process, from its state on (field 3 of
// proc_pid_stat(5)); empty when it is gone.
func processStat(pid int) []string {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	// The command's name, in parentheses, may hold anything.
	return strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
}

// locked runs fn while no other process makes or removes labs. The directory
// is itself the lock, and goes when the last lab does.
func locked(fn func() error) error {
	for {
		if err := os.MkdirAll(rootDir, 0o755); err != nil {
			return fmt.Errorf("create %s: %w", rootDir, err)
		}
		d, err := os.Open(rootDir)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the last lab's end was between the two
		}
		if err != nil {
			return err
		}
		if err := flock(d); err != nil {
			d.Close()
			return fmt.Errorf("lock %s: %w", rootDir, err)
		}
		if !current(d) {
			d.Close() // we waited for a directory that was removed
			continue
		}
		err = fn()
		os.Remove(rootDir) // fails, as it should, while there are labs
		d.Close()
		return err
	}
}

func flock(f *os.File) error {
	for {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func current(d *os.File) bool {
	a, err1 := d.Stat()
	b, err2 := os.Stat(rootDir)
	return err1 == nil && err2 == nil && os.SameFile(a, b)
}

// claim makes the lab's directory and writes its owner, after removing what
// dead labs left.
func claim(me Info) error {
	return locked(func() error {
		if _, err := sweep(); err != nil {
			return err
		}
		if err := os.Mkdir(me.dir(), 0o755); errors.Is(err, fs.ErrExist) {
			other := readInfo(me.Name)
			return fmt.Errorf("lab %s is running (process %d): choose another name or end it", me.Name, other.PID)
		} else if err != nil {
			return fmt.Errorf("create lab %s: %w", me.Name, err)
		}
		raw, err := json.Marshal(me)
		if err == nil {
			err = os.WriteFile(filepath.Join(me.dir(), ownerFile), raw, 0o644)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("write owner of lab %s: %w", me.Name, err), os.RemoveAll(me.dir()))
		}
		// Namespaces of this name, without a directory: somebody removed it by hand.
		return removeSpaces(me.Name)
	})
}

// readInfo reads a lab's owner. A lab without a readable one died while it was
// being claimed, or is of another boot.
func readInfo(name string) Info {
	i := Info{}
	raw, err := os.ReadFile(filepath.Join(rootDir, name, ownerFile))
	if err == nil {
		err = json.Unmarshal(raw, &i)
	}
	i.Name = name
	start := processStart(i.PID)
	i.Alive = err == nil && start != "" && start == i.Start && i.Boot == bootID()
	i.NetNS = spacesOf(name)
	return i
}

// List returns the labs that exist, by name.
func List() ([]Info, error) {
	entries, err := os.ReadDir(rootDir)
	if errors.Is(err, fs.ErrNotExist) {
		return []Info{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	out := []Info{}
	for _, e := range entries {
		if nameOK.MatchString(e.Name()) {
			out = append(out, readInfo(e.Name()))
		}
	}
	return out, nil
}

// GC removes the labs whose owners are dead and returns their names.
func GC() (swept []string, err error) {
	err = locked(func() (err error) { swept, err = sweep(); return err })
	return swept, err
}

func sweep() (swept []string, err error) {
	all, err := List()
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, i := range all {
		if i.Alive {
			continue
		}
		if err := i.remove(); err != nil {
			errs = append(errs, fmt.Errorf("remove dead lab %s: %w", i.Name, err))
			continue
		}
		swept = append(swept, i.Name)
	}
	return swept, errors.Join(errs...)
}

// remove takes all of a lab away, its directory last: an interrupted remove is
// found and repeated.
func (i Info) remove() error {
	err := errors.Join(
		killMarked(i.mark()),
		unmount(i.bpf()), // and with it all pins
		unmount(i.state()),
		removeSpaces(i.Name),
	)
	if err != nil {
		return err
	}
	return os.RemoveAll(i.dir())
}

// spacesOf lists the paths of a lab's namespaces.
func spacesOf(name string) []string {
	paths, _ := filepath.Glob(filepath.Join(netnsDir, "mst-"+name+"-*")) // only a bad pattern fails
	slices.Sort(paths)
	return append([]string{}, paths...) // a list, also of nothing
}

func removeSpaces(name string) error {
	var errs []error
	for _, p := range spacesOf(name) {
		errs = append(errs, deleteNetNS(p))
	}
	return errors.Join(errs...)
}
