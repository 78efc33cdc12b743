// SPDX-License-Identifier: Apache-2.0

package cni

// ADDs that come at once take turns. Else they would stand in line in the kernel,
// which has one lock for all interfaces, and with the node's engine, and all would
// end last; so half of them end in half the time. While one works, others start
// and end. A DEL waits most of its time, and many wait as long as one.

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// turns is how many ADDs are at work at once.
func turns() int { return min(max(runtime.NumCPU()/2, 1), 2) }

// turn is a process's, without an agent: a lock on one of a few files. The kernel
// drops it when the process ends, however. nil is one that waits for nobody.
type turn struct{ file *os.File }

// takeTurn waits for one. Where that cannot be, the call goes on without: turns
// only save time.
func takeTurn(s store) *turn {
	n := turns()
	for i := range n + 1 { // at last, whoever has the first one is waited for
		how := unix.LOCK_EX
		if i < n {
			how |= unix.LOCK_NB
		}
		f, err := os.OpenFile(filepath.Join(s.dir, fmt.Sprintf("turn-%d", (os.Getpid()+i)%n)), os.O_RDONLY|os.O_CREATE, 0o600)
		if err != nil {
			return nil
		}
		if err := unix.Flock(int(f.Fd()), how); err == nil {
			return &turn{f}
		}
		f.Close()
	}
	return nil
}

// end lets the next one go on: also before a wait, which may be long.
func (t *turn) end() {
	if t != nil && t.file != nil {
		t.file.Close()
		t.file = nil
	}
}
