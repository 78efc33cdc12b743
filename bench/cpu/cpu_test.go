// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

func TestReadParsesBothHierarchies(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"cpuacct.usage": "1500000\n",
		"cpu.stat":      "usage_usec 2500\nuser_usec 1000\nsystem_usec 1500\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for kind, want := range map[string]time.Duration{
		Cpuacct: 1500 * time.Microsecond, CPUStat: 2500 * time.Microsecond, Getrusage: 0,
	} {
		got, err := Source{Kind: kind, Dir: dir}.Read()
		if err != nil || got.Load != want {
			t.Errorf("%s: %v, %v; want %v", kind, got.Load, err, want)
		}
	}
	if _, err := (Source{Kind: CPUStat, Dir: filepath.Join(dir, "gone")}).Read(); err == nil {
		t.Error("a group that is gone must be an error, not zero CPU time")
	}
}

func TestHasOptionMatchesWholeWords(t *testing.T) {
	if !hasOption("rw,relatime,cpu,cpuacct", "cpuacct") || hasOption("rw,cpuacctx", "cpuacct") {
		t.Error("mount options must be compared word by word")
	}
}

func TestGroupIsRemovedOnClose(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	g := NewGroup("mustang-cputest", []int{0})
	if _, err := g.Read(); err != nil {
		t.Error(err)
	}
	env := g.Env("e1")
	dirs := g.Joins(env)
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s is still there", dir)
		}
	}
	if err := g.Close(); err != nil {
		t.Errorf("closing again: %v", err)
	}
}

func TestGroupsOfKilledRunsGo(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	left := NewGroup(fmt.Sprintf("%s%d", namePrefix, dead.ProcessState.Pid()), []int{0})
	if left.Kind == Getrusage {
		t.Skip("no control groups")
	}
	dirs := left.Joins(left.Env("e0"))
	server := exec.Command("sleep", "60") // as nginx, whose bench was killed
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, server.Process.Pid), 0); err != nil {
			t.Error(err)
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	mine := NewGroup(Name(), []int{0})
	other := NewGroup("mustang-cputest", []int{0})
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		t.Error("a killed run's server goes on")
		_ = server.Process.Kill()
	}
	for _, dir := range dirs {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s is still there", dir)
		}
	}
	if _, err := mine.Read(); err != nil {
		t.Errorf("a living run's group: %v", err)
	}
	if err := errors.Join(mine.Close(), other.Close()); err != nil {
		t.Error(err)
	}
}
