// SPDX-License-Identifier: Apache-2.0

package lab

// Network namespaces: making and removing them, and running code and commands
// in them.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const netnsDir = "/var/run/netns" // iproute2's place

// Space is a network namespace of a lab.
type Space struct {
	NetNS  string // path
	Cgroup string // directory whose processes are this machine's to mustang; "" outside, and where there is no cgroup v2
	env    string // the lab's mark, which its processes carry
}

// Do runs fn on a thread in the namespace. Sockets that fn makes stay there;
// goroutines that it starts do not run there.
func (s *Space) Do(fn func() error) error { return inNetNS(s.NetNS, fn) }

// Cmd is an exec.Cmd that starts in a network namespace. Mounts and cgroups are
// the caller's, which `ip netns exec` would hide.
type Cmd struct {
	*exec.Cmd
	netns string
}

// Command prepares argv to run in the namespace. When ctx ends, the process
// gets SIGTERM, and SIGKILL two seconds later.
func (s *Space) Command(ctx context.Context, argv ...string) *Cmd {
	c := exec.CommandContext(ctx, argv[0], argv[1:]...)
	c.Env = append(os.Environ(), s.env)
	c.Cancel = func() error { return c.Process.Signal(unix.SIGTERM) }
	c.WaitDelay = 2 * time.Second
	return &Cmd{c, s.NetNS}
}

// Start is exec.Cmd's: the child inherits the thread's namespace.
func (c *Cmd) Start() error { return inNetNS(c.netns, c.Cmd.Start) }

// Run is exec.Cmd's.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output is exec.Cmd's.
func (c *Cmd) Output() (out []byte, err error) {
	err = inNetNS(c.netns, func() (err error) { out, err = c.Cmd.Output(); return err })
	return out, err
}

// CombinedOutput is exec.Cmd's.
func (c *Cmd) CombinedOutput() (out []byte, err error) {
	err = inNetNS(c.netns, func() (err error) { out, err = c.Cmd.CombinedOutput(); return err })
	return out, err
}

func inNetNS(path string, fn func() error) error {
	target, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", path, err)
	}
	defer target.Close()
	return onThread(func() error {
		if err := netns.Set(target); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return fn()
	})
}

// onThread runs fn, which may change its thread's namespace, and puts the
// thread back. A thread that cannot go back stays locked when its goroutine
// ends, so that the runtime destroys it.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer home.Close()
		err = fn()
		if netns.Set(home) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// shareNetNSDir makes netnsDir a shared mount, as `ip netns add` does at its first
// use: it would cover the mounts of names that were there before, which could not
// be removed then.
func shareNetNSDir() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(netnsDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	err = unix.Mount("", netnsDir, "", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // no mount yet
		err = unix.Mount(netnsDir, netnsDir, "", unix.MS_BIND|unix.MS_REC, "")
		if err == nil {
			err = unix.Mount("", netnsDir, "", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	return err
}

// createNetNS makes a namespace and names it by a bind mount.
func createNetNS(name string) (path string, err error) {
	path = filepath.Join(netnsDir, name)
	if err := shareNetNSDir(); err != nil {
		return "", fmt.Errorf("create network namespace %s: %w", name, err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return "", fmt.Errorf("create network namespace %s: %w", name, err)
	}
	f.Close()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
	if err != nil {
		return "", errors.Join(fmt.Errorf("create network namespace %s: %w", name, err), deleteNetNS(path))
	}
	return path, nil
}

// deleteNetNS also works on what a killed createNetNS left. Absent is success.
func deleteNetNS(path string) error {
	err := unmount(path)
	if rmErr := os.Remove(path); rmErr != nil && !errors.Is(rmErr, fs.ErrNotExist) {
		err = errors.Join(err, fmt.Errorf("remove network namespace: %w", rmErr))
	}
	return err
}

// unmount detaches whatever is mounted at path; nothing there is success.
func unmount(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}
