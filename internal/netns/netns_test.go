// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func tempPath(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	path := Path(fmt.Sprintf("mstns-%d", os.Getpid()))
	t.Cleanup(func() {
		if err := Delete(path); err != nil {
			t.Error(err)
		}
	})
	return path
}

func inode(t *testing.T, path string) string {
	t.Helper()
	s, err := os.Readlink(path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestCreateDoDelete(t *testing.T) {
	path := tempPath(t)
	if err := Create(path); err != nil {
		t.Fatal(err)
	}
	if err := Create(path); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second Create: %v, want ErrExist", err)
	}
	home := inode(t, threadSelf)
	var there string
	if err := Do(path, func() error { there = inode(t, threadSelf); return nil }); err != nil {
		t.Fatal(err)
	}
	if there == home {
		t.Error("Do ran fn at home")
	}
	// Whichever thread runs now, it is at home.
	for range 50 {
		done := make(chan string)
		go func() { s, _ := os.Readlink(threadSelf); done <- s }()
		if got := <-done; got != home {
			t.Fatalf("a thread stayed in %s, home is %s", got, home)
		}
	}
	for range 2 {
		if err := Delete(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCreateTakesOverWhatAKilledCreateLeft(t *testing.T) {
	path := tempPath(t)
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if Is(path) {
		t.Error("a plain file counts as a namespace")
	}
	if err := Create(path); err != nil {
		t.Fatal(err)
	}
	if !Is(path) {
		t.Error("Create made no namespace")
	}
}

func TestAPipeIsNoNamespace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	opened := make(chan error, 1)
	go func() {
		_, err := Open(path)
		opened <- err
	}()
	select {
	case err := <-opened:
		if !errors.Is(err, ErrNotNetNS) {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("somebody is waited for to write to it")
	}
}

// A name that was made before the machine's first `ip netns add` can be removed after it.
func TestNamesOutliveTheFirstIPNetnsAdd(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	const child = "MUSTANG_TEST_OWN_MOUNTS"
	if os.Getenv(child) == "" {
		c := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), child+"=1")
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil { // where no name was ever made
		t.Fatal(err)
	}
	name, others := Path("mine"), "ips"
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"add", "del"} {
		if out, err := exec.Command("ip", "netns", what, others).CombinedOutput(); err != nil {
			t.Fatalf("ip netns %s: %v: %s", what, err, out)
		}
	}
	if err := Delete(name); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
}
