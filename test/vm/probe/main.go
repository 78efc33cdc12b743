// SPDX-License-Identifier: Apache-2.0

// Command probe tells which features the running kernel has, as far as it can by
// using them: a program must count a real packet, a device must be made, a
// connection must be refused. test/vm/selftest builds it static and runs it in
// each guest.
//
// It prints one line a feature, "name<TAB>yes|no<TAB>note", and fails only when
// it cannot probe at all. It leaves nothing behind: each probe has a network
// namespace of its own, which ends with its thread.
package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// A feature is something a datapath can use or must do without. Its probe
// returns nil when the kernel did it, and otherwise what stood in the way.
type feature struct {
	name  string
	probe func() error
}

var table = []feature{
	{"kernel BTF", kernelBTF},
	{"tcx", tcxCounts},
	{"clsact cls_bpf", clsactCounts},
	{"netkit", netkitCounts},
	{"XDP on veth (native)", xdpCounts},
	{"ipvlan l2, l3, l3s", ipvlanModes},
	{"macvlan", macvlan},
	{"wireguard", wireguard},
	{"ESP rfc4106(gcm(aes))", espState},
	{"IPv4 BIG TCP", bigTCPv4},
	{"cgroup sock_addr by bpf_link", connectHook},
	{"SO_NETNS_COOKIE", netnsCookie},
	{"bpf_redirect_peer", redirectPeer},
	{"bpf_redirect_neigh", redirectNeigh},
	{"bpf_check_mtu", checkMTU},
	{"bpf_ktime_get_coarse_ns", coarseTime},
	{"atomic cmpxchg", cmpxchg},
	{"bpf_timer", timers},
	{"bpf_loop", loopHelper},
	{"bpf_sock_destroy", sockDestroy},
	{"LRU hash", lruHash},
	{"batch lookup of an LRU hash", lruBatch},
	{"ring buffer", ringBuffer},
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run() error {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fmt.Errorf("read the kernel's release: %w", err)
	}
	if err := inNetns(func() error { return nil }); err != nil {
		return fmt.Errorf("make a network namespace (root is needed): %w", err)
	}
	fmt.Printf("release\t%s\t\n", unix.ByteSliceToString(u.Release[:]))
	for _, f := range table {
		answer, note := "yes", ""
		if err := inNetns(f.probe); err != nil {
			answer, note = "no", firstLine(err)
		}
		fmt.Printf("%s\t%s\t%s\n", f.name, answer, note)
	}
	return nil
}

// firstLine keeps a verifier's log out of the table.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// inNetns runs f on a thread in a new network namespace with lo up. The
// goroutine never unlocks its thread, so thread and namespace end with f.
func inNetns(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("unshare: %w", err)
			return
		}
		done <- errors.Join(up("lo"), f())
	}()
	return <-done
}
