// SPDX-License-Identifier: Apache-2.0

// Package netns runs code in another network namespace, and makes and removes
// named ones. A namespace belongs to a thread, not to a process: everything
// here keeps that from leaking into the rest of the program.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Dir is where named namespaces live; iproute2 uses the same place.
const Dir = "/var/run/netns"

// ErrNotNetNS says that a path is there and is not a network namespace: also
// what a killed Create leaves.
var ErrNotNetNS = errors.New("not a network namespace")

const threadSelf = "/proc/thread-self/ns/net"

// Path is the file of the namespace called name.
func Path(name string) string { return filepath.Join(Dir, name) }

// Open opens the namespace at path and checks that it is one. A pipe that nobody
// writes to is waited for by nobody.
func Open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(fmt.Errorf("statfs %s: %w", path, err), f.Close())
	}
	if st.Type != unix.NSFS_MAGIC && st.Type != unix.PROC_SUPER_MAGIC {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, ErrNotNetNS), f.Close())
	}
	return f, nil
}

// Current opens the namespace of the calling thread. The caller has locked its
// thread if that namespace is not the process's own.
func Current() (*os.File, error) { return Open(threadSelf) }

// Is reports whether path is a namespace file.
func Is(path string) bool {
	f, err := Open(path)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// Do runs fn on a thread that is in the namespace at path. fn runs in a
// goroutine of its own, with its thread locked; goroutines that it starts are
// not in the namespace.
func Do(path string, fn func() error) error {
	f, err := Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return DoFile(f, fn)
}

// DoFile is Do for an open namespace.
func DoFile(ns *os.File, fn func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", ns.Name(), err)
		}
		return fn()
	})
}

// Visit runs fn in an open namespace on the calling thread, and goes back home.
// The caller has locked its thread. One that cannot go back stays locked
// whatever the caller unlocks, and ends with its goroutine.
func Visit(there, home *os.File, fn func() error) error {
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", there.Name(), err)
	}
	err := fn()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		runtime.LockOSThread()
		err = errors.Join(err, fmt.Errorf("return from network namespace %s: %w", there.Name(), back))
	}
	return err
}

// onThread runs fn, which may change its thread's namespace, and puts the
// thread back. A thread that cannot go back stays locked when its goroutine
// ends, so that the runtime destroys it.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := Current()
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer home.Close()
		err = fn()
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// Cookie identifies the namespace of the calling thread, for as long as the
// machine runs (SO_NETNS_COOKIE).
func Cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket to ask for the namespace's cookie: %w", err)
	}
	defer unix.Close(fd)
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("the kernel does not tell namespaces apart for sockets (SO_NETNS_COOKIE, Linux 5.14): %w", err)
	}
	return c, nil
}

// shareDir makes dir, and of it a mount that is shared, as `ip netns add` does at
// its first use: names that lie there before could not be removed after that, for
// their mounts would be covered.
func shareDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil { // which ip takes, too
		return fmt.Errorf("lock %s: %w", dir, err)
	}
	share := func() error { return unix.Mount("", dir, "", unix.MS_SHARED|unix.MS_REC, "") }
	if err = share(); !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind mount %s to itself: %w", dir, err)
	}
	return share()
}

// New makes a namespace that has no name: it is there for as long as the file is
// open, or something else holds it.
func New() (f *os.File, err error) {
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("create a network namespace: %w", err)
		}
		f, err = Current()
		return err
	})
	return f, err
}

// Create makes a new namespace and names it by a bind mount at path. A plain
// file at path is what a killed Create left behind: it is taken over.
func Create(path string) error {
	if err := shareDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("create network namespace %s: %w", path, err)
	}
	if Is(path) {
		return fmt.Errorf("create network namespace %s: %w", path, fs.ErrExist)
	}
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		return Keep(path)
	})
	if err != nil {
		return errors.Join(fmt.Errorf("create network namespace %s: %w", path, err), Delete(path))
	}
	return nil
}

// Delete removes the name at path; the namespace itself goes when its last
// process and descriptor do. An absent name is success.
func Delete(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH)
	// EINVAL: a file that no namespace was ever mounted on.
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network namespace %s: %w", path, err)
	}
	return nil
}

// Keep names the calling thread's namespace by a bind mount at path, for as long as
// the mount is there: in a container, no longer than that.
func Keep(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return err
	}
	f.Close()
	if err := unix.Mount(threadSelf, path, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("bind mount: %w", err), os.Remove(path))
	}
	return nil
}
