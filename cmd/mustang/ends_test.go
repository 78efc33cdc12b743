// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What could not be printed was not told.
func TestAnOutputThatCannotBeWrittenIsAFailure(t *testing.T) {
	w := newTool(t)
	w.ok("svc", "add", "--service=10.96.0.100:5201", "--backend=192.168.10.10:5201")
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, args := range [][]string{{"svc", "ls"}, {"svc", "ls", "-o", "json"}, {"status"}} {
		var errs strings.Builder
		cmd := w.command(args...)
		cmd.Stdout, cmd.Stderr = full, &errs
		if err := cmd.Run(); cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(errs.String(), "no space left") {
			t.Errorf("%v: %v: %s", args, err, &errs)
		}
	}
}

// Who waits for another tool is ended by Ctrl-C, and has changed nothing.
func TestCtrlCEndsTheWaitForAnotherTool(t *testing.T) {
	w := newTool(t)
	w.ok("svc", "add", "--service=10.96.0.100:5201", "--backend=192.168.10.10:5201")
	before := w.services()
	dir, err := os.Open(w.bpffs)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	cmd := w.command("svc", "add", "--service=10.96.0.101:5201", "--backend=192.168.10.10:5201")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	_ = cmd.Process.Signal(unix.SIGINT)
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("it waits on")
		_ = cmd.Process.Kill()
	}
	if code := cmd.ProcessState.ExitCode(); code == 0 {
		t.Error("it ended as if it had done its work")
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if after := w.services(); !slices.Equal(after, before) {
		t.Errorf("%v, want %v", after, before)
	}
}
