// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A path's mode can be changed, and a descriptor handed on: who is on the other side is
// asked of the kernel, and another user gets no answer.
func TestAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("another user is only root's to become")
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	l, err := Listen(path)
	err = errors.Join(err, os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o755), os.Chmod(path, 0o666))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	refused, done := make(chan error, 10), make(chan error, 1)
	go func() {
		done <- Serve(ctx, l, func(c *net.UnixConn) { c.Write([]byte("here")) }, func(err error) { refused <- err })
	}()
	answer := make(chan string, 1)
	go func() { answer <- ask(path, 65534) }()
	if got := <-answer; got != "" {
		t.Errorf("another user's answer is %q", got)
	}
	select {
	case err := <-refused:
		if text := err.Error(); !strings.Contains(text, "user 65534") || !strings.Contains(text, "only root") {
			t.Errorf("refused with %q", text)
		}
	case <-time.After(10 * time.Second):
		t.Error("nobody is told of it")
	}
	read(t, dial(t, path)) // root is answered still
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// ask is what a user is answered, or what went wrong. The thread that has become the user dies.
func ask(path string, uid uintptr) string {
	runtime.LockOSThread()
	const keep = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uid, keep); errno != 0 {
		return errno.Error()
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err.Error()
	}
	defer unix.Close(fd)
	timeout := unix.Timeval{Sec: 10}
	err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.Connect(fd, &unix.SockaddrUnix{Name: path}))
	if err != nil {
		return err.Error()
	}
	var buf [16]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return err.Error()
	}
	return string(buf[:n])
}

// An agent that ends lets go of its tables only when the last answer is given.
func TestServeWaitsForTheLastAnswer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	asked, let, done := make(chan bool), make(chan bool), make(chan error, 1)
	go func() {
		done <- Serve(ctx, l, func(*net.UnixConn) { asked <- true; <-let }, func(err error) { t.Error(err) })
	}()
	c := dial(t, path)
	defer c.Close()
	<-asked
	stop()
	select {
	case err := <-done:
		t.Errorf("it returned %v, and an answer is still to be given", err)
	case <-time.After(100 * time.Millisecond):
	}
	close(let)
	if err := <-done; err != nil {
		t.Error(err)
	}
}
