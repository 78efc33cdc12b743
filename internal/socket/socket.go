// SPDX-License-Identifier: Apache-2.0

// Package socket has the sockets by which an agent is asked on its own machine, by
// root or by its own user alone.
package socket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Beside is where Listen binds first: what a killed agent may leave, next to path.
func Beside(path string) string { return path + ".new" }

// Listen makes the socket at path, for its owner alone from its first instant, in
// place of one that a killed agent left. The caller holds the scope's lock: so no
// living agent's is taken away. Its directory may be gone, or another than before.
// Closing it leaves the path.
func Listen(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	for _, p := range []string{Beside(path), path} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove an old socket: %w", err)
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: Beside(path), Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // it knows the other name
	if err := errors.Join(os.Chmod(Beside(path), 0o600), os.Rename(Beside(path), path)); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Of accept, what may pass: the process or the machine has nothing left for a
// connection. pause is between two tries.
var passing = []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM}

const pause = 50 * time.Millisecond

// look is how often Serve looks whether its path is still there, when nobody comes by it.
var look = 5 * time.Second

// Serve has each connection of root, or of this process's own user, answered in a
// goroutine of its own, until ctx ends. It closes l, which Listen made, and returns when
// the last answer is given. A path that somebody has removed is made again: nobody would
// come any more, and nobody would be told. refused hears of what goes wrong.
func Serve(ctx context.Context, l *net.UnixListener, answer func(*net.UnixConn), refused func(error)) error {
	var calls sync.WaitGroup
	defer calls.Wait()
	defer func() { l.Close() }()
	path := strings.TrimSuffix(l.Addr().String(), Beside(""))
	defer wakes(ctx, l)()
	told := false
	for {
		if err := l.SetDeadline(time.Now().Add(look)); err != nil {
			return err
		}
		if ctx.Err() != nil { // that may have taken back what ended the wait
			return nil
		}
		conn, err := l.AcceptUnix()
		if ctx.Err() != nil {
			if err == nil {
				conn.Close()
			}
			return nil
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			made, err := again(path)
			if err != nil && !told {
				refused(fmt.Errorf("the socket %s is gone, and cannot be made again yet: %w", path, err))
			}
			told = err != nil
			if made != nil {
				l.Close()
				l = made
				defer wakes(ctx, l)()
			}
			continue
		}
		if slices.ContainsFunc(passing, func(e error) bool { return errors.Is(err, e) }) {
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		calls.Go(func() {
			defer conn.Close()
			if err := CheckPeer(conn); err != nil {
				refused(err)
				return
			}
			answer(conn)
		})
	}
}

// wakes ends the wait for a connection when ctx ends, until its answer is called.
func wakes(ctx context.Context, l *net.UnixListener) func() bool {
	return context.AfterFunc(ctx, func() { _ = l.SetDeadline(time.Now()) }) // one that is closed has no wait
}

// again makes the socket at path where nothing is; else it is nil.
func again(path string) (*net.UnixListener, error) {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return Listen(path)
}

// CheckPeer wants the other side to be root, or this process's own user.
func CheckPeer(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var refused error
	err = raw.Control(func(fd uintptr) { refused = CheckPeerFD(int(fd)) })
	return errors.Join(err, refused)
}

// CheckPeerFD is CheckPeer for who holds a file descriptor.
func CheckPeerFD(fd int) error {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fmt.Errorf("ask who is on the other side of the agent's socket: %w", err)
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("process %d of user %d is on the other side of the agent's socket, and only root may be", cred.Pid, cred.Uid)
	}
	return nil
}
