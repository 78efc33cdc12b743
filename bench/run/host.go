// SPDX-License-Identifier: Apache-2.0

package run

// What a bench needs of the machine: to be alone, and CPUs.

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// lockFile keeps two benches from measuring each other.
const lockFile = "/run/mustang-bench.lock"

// NeedsRoot refuses another user's process.
func NeedsRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("the bench makes network namespaces: run it as root")
	}
	return nil
}

// Lock makes this process the only bench on the machine until unlock.
func Lock() (unlock func(), err error) {
	if err := NeedsRoot(); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", lockFile, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, errors.New("another bench runs on this machine: two would measure each other; wait for it")
	}
	// The file stays: removing a lock file lets a waiter lock a nameless one.
	return func() { f.Close() }, nil
}

// CPUs are the client's, and the server's for cross-core samples: the last two that
// this process may use, since the first one tends to carry the machine's interrupts.
// With one CPU both are that, unless they must differ.
func CPUs(cross bool) (client, server int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, 0, fmt.Errorf("read CPU affinity: %w", err)
	}
	var allowed []int
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			allowed = append(allowed, i)
		}
	}
	client = allowed[len(allowed)-1]
	if len(allowed) == 1 {
		if cross {
			return 0, 0, errors.New("cross-core samples need two CPUs, this process may use one: use --cores same")
		}
		return client, client, nil
	}
	return client, allowed[len(allowed)-2], nil
}

// Read is a file of /proc in one line, "unknown" when there is none.
func Read(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(text))
}
