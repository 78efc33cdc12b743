// SPDX-License-Identifier: Apache-2.0

// Package leftover finds what killed runs have left, by its name: that of a process is in it.
package leftover

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Of is what lies in dir under the prefix and the number of a process that is dead,
// be there more behind a dash. A living one's is its own.
func Of(dir, prefix string) (dead []string) {
	paths, _ := filepath.Glob(filepath.Join(dir, prefix+"*")) // only a bad pattern fails
	for _, path := range paths {
		number, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), prefix), "-")
		if pid, err := strconv.Atoi(number); err == nil && pid > 0 && errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			dead = append(dead, path)
		}
	}
	return dead
}

const tempPrefix = "mustang-bench-"

// TempDir makes a directory for temporary files of a kind. It is its maker's to remove; after a
// killed one, Sweep does.
func TempDir(kind string) (string, error) {
	return os.MkdirTemp("", fmt.Sprintf("%s%d-%s-", tempPrefix, os.Getpid(), kind))
}

// Sweep removes the temporary directories of killed runs.
func Sweep() error {
	var errs []error
	for _, dir := range Of(os.TempDir(), tempPrefix) {
		errs = append(errs, os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}
