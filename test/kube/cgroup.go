// SPDX-License-Identifier: Apache-2.0

// This file gives every machine a control group of its own in each hierarchy.
// A machine sees its own one as the root, by a cgroup namespace, so that an
// agent attaches its programs to "the cgroup2 root" and reaches exactly that
// machine's processes.

package kube

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	cgroupRoot = "/sys/fs/cgroup"
	// cgroup2Mount is where the unified hierarchy is on a hybrid system.
	cgroup2Mount = cgroupRoot + "/unified"
	cgroupPrefix = "mustang-kube"
)

// hierarchy is one mounted tree of control groups.
type hierarchy struct {
	Mount string // where it is mounted, here and in a machine
	Type  string // "cgroup" or "cgroup2"
	Data  string // mount options that name it
	own   string // our own group's directory
}

// CheckMachine says why no cluster can start on this machine.
func CheckMachine() error {
	_, err := hierarchies()
	return err
}

// hierarchies lists the trees of this machine.
func hierarchies() ([]hierarchy, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	var all []hierarchy
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		dash := slices.Index(f, "-")
		if dash < 0 || !strings.HasPrefix(f[dash+1], "cgroup") {
			continue
		}
		h := hierarchy{Mount: f[4], Type: f[dash+1]}
		controllers, path, ok := groupOf(string(groups), strings.Split(f[dash+3], ","))
		if !ok || !strings.HasPrefix(h.Mount, cgroupRoot) {
			continue
		}
		h.own = filepath.Join(h.Mount, strings.TrimPrefix(path, f[3]))
		if h.Data = controllers; strings.HasPrefix(controllers, "name=") {
			h.Data = "none," + controllers
		}
		all = append(all, h)
	}
	if !slices.ContainsFunc(all, func(h hierarchy) bool { return h.Mount == cgroup2Mount }) {
		return nil, errors.New("need the control groups of both versions, the second at " + cgroup2Mount +
			" (boot with systemd.unified_cgroup_hierarchy=0)")
	}
	return all, nil
}

// groupOf finds the line of /proc/self/cgroup that belongs to a mount's
// options; version 2 has neither controllers nor a name there.
func groupOf(groups string, options []string) (controllers, path string, ok bool) {
	for line := range strings.Lines(groups) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		first, _, _ := strings.Cut(f[1], ",")
		if first == "" {
			controllers, path, ok = "", f[2], true // unless a better one follows
		} else if slices.Contains(options, first) {
			return f[1], f[2], true
		}
	}
	return controllers, path, ok
}

// cgroupLinks are the other names of hierarchies, such as cpu → cpu,cpuacct.
func cgroupLinks() map[string]string {
	links := map[string]string{}
	entries, _ := os.ReadDir(cgroupRoot)
	for _, e := range entries {
		if target, err := os.Readlink(filepath.Join(cgroupRoot, e.Name())); err == nil {
			links[e.Name()] = target
		}
	}
	return links
}

// planCgroups records the groups that makeCgroups will make. They lie below
// our own groups, so that what limits us limits the cluster.
func (c *cluster) planCgroups() ([]hierarchy, error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	for _, h := range all {
		top := filepath.Join(h.own, cgroupPrefix)
		c.Cgroups = append(c.Cgroups, top, filepath.Join(top, c.Config.Name))
		for _, machine := range c.Config.machines() {
			c.Cgroups = append(c.Cgroups, filepath.Join(top, c.Config.Name, machine))
		}
	}
	return all, nil
}

func (c *cluster) makeCgroups() error {
	for _, dir := range c.Cgroups {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		// A cpuset without processors admits nobody.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil || strings.TrimSpace(string(value)) != "" {
				continue
			}
			if value, err = os.ReadFile(filepath.Join(filepath.Dir(dir), file)); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, file), value, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// cgroupsOf lists a machine's groups, one for each hierarchy.
func (c *cluster) cgroupsOf(machine string) []string {
	var dirs []string
	for _, dir := range c.Cgroups {
		if strings.HasSuffix(dir, filepath.Join(cgroupPrefix, c.Config.Name, machine)) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// cgroup2 is a machine's own root of the unified hierarchy, as seen from here.
func (c *cluster) cgroup2(machine string) string {
	for _, dir := range c.cgroupsOf(machine) {
		if strings.HasPrefix(dir, cgroup2Mount+"/") {
			return dir
		}
	}
	return ""
}

// join moves the calling process, with all its threads.
func join(cgroups []string) error {
	for _, dir := range cgroups {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			return err
		}
	}
	return nil
}

// members lists the processes of a machine: whatever the kernel counts as
// descending from those that were placed in its group.
func (c *cluster) members(machine string) []int {
	var pids []int
	_ = filepath.WalkDir(c.cgroup2(machine), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil
		}
		procs, _ := os.ReadFile(path)
		for field := range strings.FieldsSeq(string(procs)) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// removeCgroups removes groups and all below them, children before parents: dirs
// has parents first. A group stays busy for a moment after its last process.
func removeCgroups(dirs []string) error {
	var failed error
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		failed = nil
		for _, dir := range slices.Backward(dirs) {
			// The directory of all clusters goes with the last one.
			err := removeTree(dir)
			if err != nil && filepath.Base(dir) != cgroupPrefix {
				failed = errors.Join(failed, err)
			}
		}
		if failed == nil || time.Now().After(deadline) {
			return failed
		}
	}
}

func removeTree(dir string) error {
	if filepath.Base(dir) != cgroupPrefix {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if e.IsDir() {
				_ = removeTree(filepath.Join(dir, e.Name()))
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}
