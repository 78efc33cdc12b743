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
	growStack()
	os.Exit(cni.Main())
}

// growStack makes the stack as large as it will be at once: else it is copied
// each time that it doubles.
//
//go:noinline
func growStack() {
	var room [64 << 10]byte
	runtime.KeepAlive(&room)
}
