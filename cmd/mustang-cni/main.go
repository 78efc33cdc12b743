// SPDX-License-Identifier: Apache-2.0

// The runtime does not look for a cgroup's limits of CPUs: that would be a good
// part of the start.

//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command mustang-cni is the CNI plugin: container runtimes call it.
package main

import (
	"os"
	"runtime/debug"

	"github.com/mustang-net/mustang/internal/cni"
)

func main() {
	// It lives for milliseconds: collecting garbage would cost more than it frees.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(256 << 20) // unless something is very large
	os.Exit(cni.Main())
}
