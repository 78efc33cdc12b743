// SPDX-License-Identifier: Apache-2.0

package lab

// Ending a lab's processes: each by its id, and only after its environment has
// shown that this lab started it.

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const killDeadline = 30 * time.Second

// killMarked ends all processes that carry the mark, and returns when they are
// gone. They may have children in the meantime, hence the rounds.
func killMarked(mark string) error {
	deadline := time.Now().Add(killDeadline)
	for {
		killed, err := killRound([]byte(mark), deadline)
		if err != nil || killed == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes with %s do not end", mark)
		}
	}
}

func killRound(mark []byte, deadline time.Time) (killed int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		hit, err := killOne(pid, mark, deadline)
		if err != nil {
			return killed, fmt.Errorf("end process %d: %w", pid, err)
		}
		if hit {
			killed++
		}
	}
	return killed, nil
}

// killOne holds the process by a descriptor from before the check until after
// the signal, so that a reused id cannot put another in its place.
func killOne(pid int, mark []byte, deadline time.Time) (bool, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return false, nil // gone, or not a process's first thread
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	if !carries(pid, mark, deadline) {
		return false, nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return false, err
	}
	for {
		left := max(0, time.Until(deadline))
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return true, err
		}
	}
}

// carries says whether the process was started with the mark. One that is just
// becoming another program shows no environment for a moment: waited for.
func carries(pid int, mark []byte, deadline time.Time) bool {
	for {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			return false // gone
		}
		if len(env) > 0 || hasNone(pid) || time.Now().After(deadline) {
			return slices.ContainsFunc(bytes.Split(env, []byte{0}), func(kv []byte) bool { return bytes.Equal(kv, mark) })
		}
		time.Sleep(time.Millisecond)
	}
}

// hasNone says whether an environment that was read empty is empty: kernel
// threads and what ends have none, and else the addresses of its start and end
// are known, and the same.
func hasNone(pid int) bool {
	const kernelThread, exiting = 0x200000, 0x4 // PF_KTHREAD, PF_EXITING
	f := processStat(pid)
	if len(f) < 49 {
		return true // gone
	}
	flags, err := strconv.ParseUint(f[6], 10, 64)
	start, end := f[47], f[48] // fields 50 and 51
	return err != nil || flags&(kernelThread|exiting) != 0 || end != "0" && start == end
}
