// SPDX-License-Identifier: Apache-2.0

// Go would read the process's cgroup and all mounts of the node to learn how many
// processors it may use: it uses one.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command mustang-cni is the CNI plugin: container runtimes call it.
package main

import (
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/cni"
)

// calm lets the threads that Go has started sleep as long as it asks for and then
// up to 10 ms more. One of them would look every 20 µs whether the only processor
// is free for somebody else, which takes a fifth of the time that the plugin lives.
func calm() {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return
	}
	for _, t := range threads {
		if fd, err := unix.Open("/proc/"+t.Name()+"/timerslack_ns", unix.O_WRONLY|unix.O_CLOEXEC, 0); err == nil {
			unix.Write(fd, []byte("10000000"))
			unix.Close(fd)
		}
	}
}

func main() {
	// It lives for milliseconds: collecting garbage would cost more than it frees.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(256 << 20) // unless something is very large
	// A second processor would only be woken, for each answer by netlink, to find
	// that the first has it already. Pods that start together are processes.
	runtime.GOMAXPROCS(1)
	calm()
	os.Exit(cni.Main())
}
