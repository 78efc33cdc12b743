// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A STATUS that is killed leaves no file in the state directory: it never has one there.
func TestStatusMakesNoFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_DELETE); err != nil {
		t.Fatal(err)
	}
	if err := writable(dir); err != nil {
		t.Error(err)
	}
	time.Sleep(10 * time.Millisecond)
	if n, err := unix.Read(fd, make([]byte, 4096)); n > 0 || err != unix.EAGAIN {
		t.Errorf("files came or went: %d bytes of events, %v", n, err)
	}
	if err := writable("/proc/self"); err == nil {
		t.Error("what nobody can write to is writable")
	}
}
