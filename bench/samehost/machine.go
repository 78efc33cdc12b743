// SPDX-License-Identifier: Apache-2.0

package samehost

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"github.com/mustang-net/mustang/bench/report"
	"golang.org/x/sys/unix"
)

// versionCommands print the version of what is behind a contestant.
var versionCommands = map[string][]string{
	"iptables-nft":    {"iptables-nft", "--version"},
	"iptables-legacy": {"iptables-legacy", "--version"},
	"nft":             {"nft", "--version"},
	"iperf3":          {"iperf3", "--version"},
}

// backendVersion names the implementation of Services, "" for mustang, which
// names itself by its program set.
func backendVersion(by string) string {
	argv := versionCommands[by]
	if argv == nil {
		return ""
	}
	out, err := exec.Command(argv[0], argv[1:]...).Output()
	if err != nil {
		return argv[0] + " (version unknown)"
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line)
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// What test/vm sets in its guests: the kernel, and the nanoseconds of one
// instruction where the clock counts those.
const (
	guestEnv       = "MUSTANG_VM"
	instructionEnv = "MUSTANG_VM_INSTRUCTION_NS"
)

// emulation is report.Machine's Emulated for this machine.
func emulation() string {
	switch {
	case os.Getenv(instructionEnv) != "":
		return report.EmulatedInstructions
	case os.Getenv(guestEnv) != "":
		return report.EmulatedTime
	}
	return ""
}

func describeMachine() report.Machine {
	m := report.Machine{
		Kernel: kernelRelease(), Emulated: emulation(), Arch: runtime.GOARCH, CPU: cpuModel(), CPUs: runtime.NumCPU(),
		Versions: map[string]string{}, Sysctls: map[string]string{},
	}
	for name := range versionCommands {
		m.Versions[name] = backendVersion(name)
	}
	// What changes figures from one machine to the next.
	for _, name := range []string{
		"net/ipv4/tcp_congestion_control", "net/ipv4/tcp_tw_reuse_delay", "net/core/netdev_budget", "net/core/bpf_jit_enable",
		"net/core/bpf_jit_harden", "net/netfilter/nf_conntrack_max", "net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem",
	} {
		if b, err := os.ReadFile("/proc/sys/" + name); err == nil {
			m.Sysctls[strings.ReplaceAll(name, "/", ".")] = strings.Join(strings.Fields(string(b)), " ")
		}
	}
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		m.MemoryMB = int(uint64(si.Totalram) * uint64(si.Unit) >> 20)
		m.Load1 = float64(si.Loads[0]) / 65536
	}
	return m
}

func cpuModel() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return "unknown CPU"
}

// chooseCPUs returns the CPU of the client, and the server's for cross-core
// samples: the last two that this process may use, since the first one tends
// to carry the machine's interrupts.
func chooseCPUs(cross bool) (client, server int, err error) {
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
			return 0, 0, fmt.Errorf("cross-core samples need two CPUs, this process may use one: use --cores same")
		}
		return client, client, nil
	}
	return client, allowed[len(allowed)-2], nil
}
