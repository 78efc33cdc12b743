// SPDX-License-Identifier: Apache-2.0

// Package leftover finds what killed runs have left, by its name.
package leftover

import (
	"errors"
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
