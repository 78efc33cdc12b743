// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Scope is one node's place on this machine. Several scopes, each used from
// its own network namespace, never see each other.
type Scope struct {
	BPFFS      string // pins: tables, programs, links
	StateDir   string // what maps cannot hold
	CgroupRoot string // whose sockets get Services at connect(); "" is the cgroup2 mount
}

// Defaults of a Scope's fields.
const (
	DefaultBPFFS    = "/sys/fs/bpf/mustang"
	DefaultStateDir = "/run/mustang"
)

func (s Scope) withDefaults() Scope {
	if s.BPFFS == "" {
		s.BPFFS = DefaultBPFFS
	}
	if s.StateDir == "" {
		s.StateDir = DefaultStateDir
	}
	s.BPFFS, s.StateDir = filepath.Clean(s.BPFFS), filepath.Clean(s.StateDir)
	return s
}

// cgroupRoot is the configured root, or where cgroup2 is mounted.
func (s Scope) cgroupRoot() (string, error) {
	if s.CgroupRoot != "" {
		return s.CgroupRoot, nil
	}
	f, err := os.Open("/proc/mounts")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if field := strings.Fields(sc.Text()); len(field) > 2 && field[2] == "cgroup2" {
			return field[1], nil
		}
	}
	return "", errors.New("no cgroup2 file system is mounted, which Services at the socket need; `mount -t cgroup2 none DIR` and name it by --cgroup-root, or use --service-path tc")
}

// checkBPFFS wants the directory, or the nearest one above it that exists, to
// be on a bpffs: pins cannot live elsewhere.
func (s Scope) checkBPFFS() error {
	dir := s.BPFFS
	var st unix.Statfs_t
	for {
		err := unix.Statfs(dir, &st)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.ENOENT) || dir == filepath.Dir(dir) {
			return fmt.Errorf("look at %s: %w", dir, err)
		}
		dir = filepath.Dir(dir)
	}
	if st.Type == unix.BPF_FS_MAGIC {
		return nil
	}
	mount := filepath.Dir(s.BPFFS)
	if strings.HasPrefix(s.BPFFS, "/sys/fs/bpf/") {
		mount = "/sys/fs/bpf"
	}
	return fmt.Errorf("%s is not on a bpffs, so nothing can be pinned there; run `mount -t bpf bpf %s`, or name another directory by --bpffs", s.BPFFS, mount)
}

const (
	lockDeadline = 60 * time.Second
	lockNotice   = 2 * time.Second
)

// acquire is lock, or one attempt where that is asked for.
func (s Scope) acquire(ctx context.Context, opts Options) (*os.File, error) {
	if !opts.NoWait {
		return s.lock(ctx, opts.Notify)
	}
	f, err := s.tryLock(unix.LOCK_NB)
	if f == nil && err == nil {
		err = fmt.Errorf("%s: %w", s.BPFFS, ErrBusy)
	}
	return f, err
}

// lock takes the scope for this process: two tools that write at once would
// undo each other. The kernel drops the lock when the process ends, however.
// Waiting tools stand in line in the kernel, so that none starves, and none
// sleeps past its turn.
func (s Scope) lock(ctx context.Context, notify func(string)) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, lockDeadline)
	defer cancel()
	for {
		if f, err := s.tryLock(unix.LOCK_NB); f != nil || err != nil {
			return f, err
		}
		f, err := s.waitLock(ctx, notify)
		if f != nil || err != nil {
			return f, err
		}
	}
}

// waitLock blocks in the kernel, on a thread of its own. When ctx ends first,
// that thread lets go of the lock as soon as it gets it.
func (s Scope) waitLock(ctx context.Context, notify func(string)) (*os.File, error) {
	type answer struct {
		f   *os.File
		err error
	}
	got := make(chan answer)
	go func() {
		f, err := s.tryLock(0)
		select {
		case got <- answer{f, err}:
		case <-ctx.Done():
			if f != nil {
				f.Close()
			}
		}
	}()
	notice := time.NewTimer(lockNotice)
	defer notice.Stop()
	for {
		select {
		case a := <-got:
			return a.f, a.err
		case <-ctx.Done():
			return nil, fmt.Errorf("another mustang works on %s and does not finish: %w; wait for it, or stop it", s.BPFFS, ctx.Err())
		case <-notice.C:
			notify(fmt.Sprintf("waiting for another mustang that works on %s", s.BPFFS))
		}
	}
}

// tryLock is one attempt, which waits unless how is LOCK_NB; nil without an
// error: it has to be done again.
func (s Scope) tryLock(how int) (*os.File, error) {
	f, err := os.Open(s.BPFFS)
	if errors.Is(err, os.ErrNotExist) {
		// A reset by another tool may have removed it a moment ago.
		if err := os.MkdirAll(s.BPFFS, 0o700); err != nil {
			return nil, fmt.Errorf("make the directory for pins: %w", err)
		}
		f, err = os.Open(s.BPFFS)
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the directory for pins: %w", err)
	}
	if err := checkOwner(f); err != nil {
		f.Close()
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|how)
	if err == nil && sameFile(f, s.BPFFS) {
		return f, nil
	}
	f.Close()
	if err == nil || errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return nil, nil
	}
	return nil, fmt.Errorf("lock %s: %w", s.BPFFS, err)
}

// checkOwner refuses a directory that another user has made where all may, as in a
// bpffs that is mounted without a mode: he could take programs away from pods.
func checkOwner(dir *os.File) error {
	info, err := dir.Stat()
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, who could take programs away from pods; remove it, or name another directory by --bpffs", dir.Name(), st.Uid)
	}
	return nil
}

// sameFile is false when the directory was removed between opening and locking.
func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}

// Displaced is an error when another directory is where the scope's was when it was
// opened: its bpffs was unmounted, or has another mounted over it. Unlike the rest of an
// Engine, it may be called while another goroutine uses it.
func (e *Engine) Displaced() error {
	if e.lock == nil || sameFile(e.lock, e.scope.BPFFS) {
		return nil
	}
	return fmt.Errorf("%s is not the directory any more that this mustang has opened: its bpffs was unmounted, or another is mounted over it; programs and tables work for as long as this process runs, no pod can start, and the next one makes all anew", e.scope.BPFFS)
}

// privilege adds the mend to errors that come from a lack of it.
func privilege(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w; mustang needs CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN, so run it as root", err)
	}
	return err
}
