// SPDX-License-Identifier: Apache-2.0

// Command mustang-cni is the CNI plugin: container runtimes call it.
package main

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/mustang-net/mustang/internal/cni"
)

func main() {
	// It lives for milliseconds: collecting garbage would cost more than it frees.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(256 << 20) // unless something is very large
	// A second processor would only be woken, for each answer by netlink, to find
	// that the first has it already. Pods that start together are processes.
	runtime.GOMAXPROCS(1)
	os.Exit(cni.Main())
}
