// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"

	"github.com/mustang-net/mustang/bench/cpu"
	"golang.org/x/sys/unix"
)

// Place is where a process runs: its network namespace, CPU and control groups.
type Place struct {
	Netns   string   // path; "" stays
	CPU     int      // number; -1 leaves the affinity alone
	Cgroups []string // directories, one a hierarchy
}

func (p *Place) flags(fs *flag.FlagSet) {
	fs.StringVar(&p.Netns, "netns", "", "path of the network namespace to enter")
	fs.IntVar(&p.CPU, "cpu", -1, "CPU to stay on; -1 for any")
	fs.Func("cgroup", "control group to join; may be repeated", func(dir string) error {
		p.Cgroups = append(p.Cgroups, dir)
		return nil
	})
}

func (p Place) args() []string {
	args := []string{"--netns", p.Netns, "--cpu", strconv.Itoa(p.CPU)}
	for _, dir := range p.Cgroups {
		args = append(args, "--cgroup", dir)
	}
	return args
}

// Enter moves the process to its control groups and CPU, and locks the calling
// goroutine to its thread and that thread into the namespace. It also turns
// the garbage collector off: the loops allocate nothing, and a collection in
// the middle of a sample would be measured as network.
func (p Place) Enter() error {
	debug.SetGCPercent(-1)
	// An explicit GOMAXPROCS also stops the runtime from following affinity
	// changes, which would stop the world while a thread blocks in the kernel.
	runtime.GOMAXPROCS(1)
	for _, dir := range p.Cgroups {
		if err := cpu.Join(dir); err != nil {
			return err
		}
	}
	return p.enterThread()
}

// enterThread locks the calling goroutine to its thread, and that to the CPU and
// into the namespace.
func (p Place) enterThread() error {
	runtime.LockOSThread()
	if p.CPU >= 0 {
		if err := pinThread(p.CPU); err != nil {
			return err
		}
	}
	if p.Netns == "" {
		return nil
	}
	fd, err := unix.Open(p.Netns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", p.Netns, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", p.Netns, err)
	}
	return nil
}

// holdOffPreemption blocks SIGURG on the calling thread. The Go runtime sends
// it to a goroutine that runs for 10 ms; it would end a blocking call early,
// and restarting the call would restart its deadline, so that a dead datapath
// would be waited for for ever.
func holdOffPreemption() error {
	var set unix.Sigset_t
	set.Val[0] = 1 << (uint(unix.SIGURG) - 1)
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &set, nil); err != nil {
		return fmt.Errorf("block SIGURG: %w", err)
	}
	return nil
}

// pinThread pins the calling thread alone. The threads of the Go runtime, which
// has its own work to do whenever the load wakes, may go to another CPU.
func pinThread(n int) error {
	var set unix.CPUSet
	set.Set(n)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("pin to CPU %d: %w", n, err)
	}
	return nil
}

// tune sets what a sample needs in its namespace. It touches nothing when no
// namespace was given, since that would be the host's.
//
// CRR leaves a TIME_WAIT at the client for each connection, as real clients
// do. Closing with SO_LINGER 0 would avoid them but would measure a reset
// instead of a close, so the ports are reused instead: a wide port range, and
// tcp_tw_reuse, which takes a port back after tcp_tw_reuse_delay (1 s). A
// client that still runs out naps and counts it (Result.PortWaits).
//
// Errors are ignored on purpose: an older kernel lacks a knob, and a missing
// one shows itself in Result.CC and Result.PortWaits.
func (p Place) tune(cc string) {
	if p.Netns == "" {
		return
	}
	knobs := map[string]string{
		"net/ipv4/tcp_tw_reuse":        "1",
		"net/ipv4/ip_local_port_range": "10000 60999", // above the server's port, and as far as Linux itself goes
		"net/ipv4/tcp_max_tw_buckets":  "262144",
		// A connection that slept between turns goes on where it was.
		"net/ipv4/tcp_slow_start_after_idle": "0",
	}
	if cc != "" { // refused for an algorithm that is not allowed; see dialCRR
		knobs["net/ipv4/tcp_congestion_control"] = cc
	}
	for name, value := range knobs {
		// /proc/sys/net follows the namespace of the calling thread.
		_ = os.WriteFile("/proc/sys/"+name, []byte(value), 0)
	}
}

// mainExec enters a place, tunes it as for the load program, and becomes another program
// there (iperf3, nginx, ab).
func mainExec(args []string) error {
	var p Place
	fs := flag.NewFlagSet("bench-load exec", flag.ContinueOnError)
	p.flags(fs)
	cc := fs.String("cc", "", "TCP congestion control")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() == 0 {
		return errors.New("bench-load exec: want a program")
	}
	path, err := exec.LookPath(fs.Arg(0))
	if err != nil {
		return err
	}
	if err := p.Enter(); err != nil {
		return err
	}
	p.tune(*cc)
	return fmt.Errorf("exec %s: %w", path, unix.Exec(path, fs.Args(), os.Environ()))
}

// ExecArgs is the command line that runs argv at a place, with a congestion control; ""
// leaves the default.
func (p Place) ExecArgs(cc string, argv ...string) []string {
	return append(append(append([]string{"exec"}, p.args()...), "--cc", cc, "--"), argv...)
}
