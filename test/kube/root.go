// SPDX-License-Identifier: Apache-2.0

// This file makes a machine's root file system out of this machine's: /usr
// read-only, /etc with a layer of its own, all else empty and inside the
// cluster's directory. None of the mounts around it are carried in: a copy of
// somebody's bpffs or network namespace would keep it alive.

package kube

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

type rootSpec struct {
	Dir         string // becomes /
	EtcUpper    string // what is written to /etc
	EtcWork     string
	Binds       []bind
	Hierarchies []hierarchy
	CgroupLinks map[string]string
	Files       map[string]string // content of files in the new root
	// Masks are sysctls of the whole machine that the kubelet sets: it finds
	// them as it wants them, and nothing is set.
	Masks map[string]string
}

type bind struct {
	Source   string // a directory here
	Target   string // where the machine sees it
	ReadOnly bool
}

// enter makes the root and moves into it. The caller has a mount namespace and
// a process namespace of its own.
func (r *rootSpec) enter() error {
	if err := mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := bindMount(r.Dir, r.Dir, false); err != nil {
		return err
	}
	for _, step := range []func() error{r.system, r.etc, r.kernel, r.cgroups, r.binds, r.pivot, r.files} {
		if err := step(); err != nil {
			return err
		}
	}
	// Only now, because until here an unmount would have spread.
	return mount("none", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

func (r *rootSpec) in(path string) string { return filepath.Join(r.Dir, path) }

// system makes the directories that a Linux system has, /usr being this machine's.
func (r *rootSpec) system() error {
	for _, dir := range []string{"home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "var/lib", "var/log", "var/tmp"} {
		if err := os.MkdirAll(r.in(dir), 0o755); err != nil {
			return err
		}
	}
	for _, dir := range []string{"tmp", "var/tmp"} {
		if err := errors.Join(os.MkdirAll(r.in(dir), 0o755), os.Chmod(r.in(dir), 0o777|fs.ModeSticky)); err != nil {
			return err
		}
	}
	if err := bindMount("/usr", r.in("usr"), true); err != nil {
		return err
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		target, err := os.Readlink("/" + dir)
		switch {
		case err == nil:
			err = symlink(target, r.in(dir))
		case isDir("/" + dir): // a system without merged /usr
			err = bindMount("/"+dir, r.in(dir), true)
		default:
			err = nil
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(symlink("/run", r.in("var/run")), symlink("/run/lock", r.in("var/lock")))
}

func (r *rootSpec) etc() error {
	for _, dir := range []string{r.in("etc"), r.EtcUpper, r.EtcWork} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return mount("overlay", r.in("etc"), "overlay", 0,
		fmt.Sprintf("lowerdir=/etc,upperdir=%s,workdir=%s", r.EtcUpper, r.EtcWork))
}

// kernel mounts what the kernel shows of the machine's own namespaces.
func (r *rootSpec) kernel() error {
	if err := os.MkdirAll(r.in("dev"), 0o755); err != nil {
		return err
	}
	if err := mount("/dev", r.in("dev"), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	const plain = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct{ kind, dir, data string }{
		{"tmpfs", "dev/shm", "mode=1777"}, {"proc", "proc", ""}, {"sysfs", "sys", ""},
		{"bpf", "sys/fs/bpf", "mode=0700"}, {"tmpfs", "run", "mode=755"},
	} {
		if err := mount(m.kind, r.in(m.dir), m.kind, plain, m.data); err != nil {
			return err
		}
	}
	// Not every kernel has these, and few programs need them.
	_ = mount("debugfs", r.in("sys/kernel/debug"), "debugfs", plain, "")
	_ = mount("tracefs", r.in("sys/kernel/tracing"), "tracefs", plain, "")
	for name, value := range r.Masks {
		file := r.in("run/masks/" + strings.ReplaceAll(name, "/", "."))
		if err := writeFile(file, value+"\n", 0o644); err != nil {
			return err
		}
		if err := mount(file, r.in("proc/sys/"+name), "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return errors.Join(os.Mkdir(r.in("run/netns"), 0o755), os.Mkdir(r.in("run/lock"), 0o1777))
}

// cgroups mounts the hierarchies anew: from inside the cgroup namespace the
// machine's own group is each one's root.
func (r *rootSpec) cgroups() error {
	if err := mount("tmpfs", r.in(cgroupRoot), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"); err != nil {
		return err
	}
	for _, h := range r.Hierarchies {
		if err := os.MkdirAll(r.in(h.Mount), 0o755); err != nil {
			return err
		}
		if err := mount(h.Type, r.in(h.Mount), h.Type, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, h.Data); err != nil {
			return err
		}
	}
	for name, target := range r.CgroupLinks {
		if err := symlink(target, r.in(filepath.Join(cgroupRoot, name))); err != nil {
			return err
		}
	}
	return nil
}

func (r *rootSpec) binds() error {
	for _, b := range r.Binds {
		if err := bindMount(b.Source, r.in(b.Target), b.ReadOnly); err != nil {
			return err
		}
	}
	return nil
}

// pivot makes the new root the root. The old one is mounted over it for an
// instant, so that no directory for it is needed (pivot_root(2), "pivot_root(".", ".")").
func (r *rootSpec) pivot() error {
	if err := os.Chdir(r.Dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root %s: %w", r.Dir, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	return os.Chdir("/")
}

func (r *rootSpec) files() error {
	for name, content := range r.Files {
		_ = os.Remove(name) // it may be a link to where there is nothing
		if err := writeFile(name, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func bindMount(source, target string, readOnly bool) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := mount(source, target, "", unix.MS_BIND, ""); err != nil || !readOnly {
		return err
	}
	return mount("none", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

func mount(source, target, kind string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, target, err)
	}
	return nil
}

func symlink(target, name string) error {
	if err := os.Symlink(target, name); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}
