// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// inCgroup puts this process where its sockets are the node's.
func inCgroup(t *testing.T) {
	t.Helper()
	join := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err := join(cgroup); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := join(filepath.Dir(cgroup)); err != nil {
			t.Error(err)
		}
	})
}

func TestOnlySocketsConnectedThroughTheServiceEnd(t *testing.T) {
	const through, others = 200, 4000
	n := newNode(t)
	paths := []string{n.pod(2), n.pod(3)}
	for _, path := range paths {
		n.run("ip -n %s -6 route add default dev eth0", filepath.Base(path))
		if _, err := n.add(path); err != nil {
			t.Fatal(err)
		}
	}
	gone, other := udp("10.96.0.1:80", "10.9.0.99:80"), udp("10.96.0.2:80", "10.9.0.99:80")
	gone6 := udp("[fd50::1]:80", "[fd09::99]:80")
	n.must(func(e *Engine) error { return e.AddServices(gone, other, gone6) })
	inCgroup(t)
	var want syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &want); err != nil || want.Cur < through+others+100 {
		t.Skipf("only %d files: %v", want.Cur, err)
	}
	open := func(path, dst string, count int) (out []net.Conn) {
		t.Helper()
		err := netns.Do(path, func() error {
			for range count {
				c, err := net.Dial("udp", dst)
				if err != nil {
					return err
				}
				out = append(out, c)
			}
			return nil
		})
		t.Cleanup(func() {
			for _, c := range out {
				c.Close()
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	var ends, stays []net.Conn
	for _, path := range paths {
		ends = append(ends, open(path, "10.96.0.1:80", through/4)...)
		ends = append(ends, open(path, "[fd50::1]:80", through/4)...)
		stays = append(stays, open(path, "10.9.0.99:80", others/8)...) // by the backend's own address
		stays = append(stays, open(path, "[fd09::99]:80", others/8)...)
		stays = append(stays, open(path, "10.96.0.2:80", others/4)...) // by another Service
	}
	n.must(func(e *Engine) error {
		if err := e.loadServices(); err != nil {
			return err
		}
		start := time.Now()
		err := e.RemoveServices(front(gone), front(gone6))
		t.Logf("%d of %d sockets ended: %v", len(ends), len(ends)+len(stays), time.Since(start))
		return err
	})
	for i, c := range ends {
		if !errors.Is(pendingError(t, c), unix.ECONNABORTED) {
			t.Fatalf("socket %d of the Service was left alone", i)
		}
	}
	for i, c := range stays {
		if err := pendingError(t, c); err != nil {
			t.Fatalf("another socket (%d, to %s): %v", i, c.RemoteAddr(), err)
		}
	}
}

// pendingError is what the socket's next operation would fail with.
func pendingError(t *testing.T, c net.Conn) error {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	value := 0
	if ctlErr := raw.Control(func(fd uintptr) { value, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR) }); ctlErr != nil || err != nil {
		t.Fatal(ctlErr, err)
	}
	if value == 0 {
		return nil
	}
	return syscall.Errno(value)
}
