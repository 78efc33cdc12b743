// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"testing"
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
