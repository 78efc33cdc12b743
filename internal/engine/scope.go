// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

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
	if e.lock == nil || sameFile(e.lock.pins, e.scope.BPFFS) {
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
