// SPDX-License-Identifier: Apache-2.0

// This file ends a cluster and removes every trace of it.

package kube

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Down ends a cluster, however far its Up came. One that does not exist is
// already down.
func Down(name string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("cluster name %q: want at most 30 of a-z, 0-9 and -", name)
	}
	c := open(name)
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if err := c.load(); errors.Is(err, fs.ErrNotExist) {
		return os.RemoveAll(c.dir)
	} else if err != nil {
		return err
	}
	return c.remove()
}

// remove ends the processes first: until they are gone nothing else can go. It
// keeps the record until all the rest is removed, so that it can be repeated.
func (c *cluster) remove() error {
	if err := c.kill(); err != nil {
		return err
	}
	err := errors.Join(c.removeNetwork(), removeCgroups(c.Cgroups), c.unmount())
	if err != nil {
		return fmt.Errorf("remove cluster %q: %w", c.Config.Name, err)
	}
	return os.RemoveAll(c.dir)
}

// kill ends each machine by its recorded first process, which takes process 1
// of the machine and everything in it along, and then what is left in the
// machine's control groups: commands that `enter` started.
func (c *cluster) kill() error {
	for _, machine := range c.Config.machines() {
		if pid := c.pid(machine); pid != 0 {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	return c.killMembers(c.Config.machines()...)
}

// killMembers ends what is in the machines' control groups.
func (c *cluster) killMembers(machines ...string) error {
	self := os.Getpid()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		var left []int
		for _, machine := range machines {
			left = append(left, c.members(machine)...)
		}
		if slices.Contains(left, self) {
			return errors.New("this process runs inside of what is to end")
		}
		if len(left) == 0 {
			return nil
		}
		for _, pid := range left {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes that do not end: %v", left)
		}
	}
}

// unmount removes mounts below the cluster's directory. A machine's own mounts
// end with it: these can only be somebody's that looked in from here.
func (c *cluster) unmount() error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if strings.HasPrefix(f[4], c.dir+"/") {
			if err := unix.Unmount(f[4], unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmount %s: %w", f[4], err)
			}
		}
	}
	return nil
}
