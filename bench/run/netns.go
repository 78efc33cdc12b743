// SPDX-License-Identifier: Apache-2.0

package run

import (
	"fmt"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NewNetNS makes a network namespace with lo up, which lives as long as the file is open;
// mtu is lo's, 0 for the kernel's. It works on a thread that is
// thrown away (never unlocked), so that no other goroutine can wake up in it.
func NewNetNS(mtu int) (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		f, err := unshareNetNS(mtu)
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}

func unshareNetNS(mtu int) (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("create network namespace (root is needed): %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find lo: %w", err)
	}
	if mtu > 0 {
		if err := netlink.LinkSetMTU(lo, mtu); err != nil {
			return nil, fmt.Errorf("set MTU of lo: %w", err)
		}
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return nil, fmt.Errorf("set lo up: %w", err)
	}
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("hold network namespace: %w", err)
	}
	return f, nil
}
