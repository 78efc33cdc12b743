// SPDX-License-Identifier: Apache-2.0

package run

import (
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
	"nginx":           {"nginx", "-v"},
	"ab":              {"ab", "-V"},
	"perf":            {"perf", "--version"},
}

// BackendVersion names the implementation of Services, "" for mustang, which
// names itself by its program set.
func BackendVersion(by string) string {
	argv := versionCommands[by]
	if argv == nil {
		return ""
	}
	if _, err := exec.LookPath(argv[0]); err != nil {
		return "" // not installed
	}
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
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

// Emulation is report.Machine's Emulated for this machine.
func Emulation() string {
	switch {
	case os.Getenv(instructionEnv) != "":
		return report.EmulatedInstructions
	case os.Getenv(guestEnv) != "":
		return report.EmulatedTime
	}
	return ""
}

func DescribeMachine() report.Machine {
	m := report.Machine{
		Kernel: kernelRelease(), Emulated: Emulation(), Arch: runtime.GOARCH, CPU: cpuModel(), CPUs: runtime.NumCPU(),
		Versions: map[string]string{}, Sysctls: map[string]string{},
	}
	for name := range versionCommands {
		if v := BackendVersion(name); v != "" {
			m.Versions[name] = v
		}
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
