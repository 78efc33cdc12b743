// SPDX-License-Identifier: Apache-2.0

// Package record keeps small JSON records in a directory, one file each,
// written before what they describe is made: so that a later process finds,
// and finishes or undoes, what a killed one began. Nothing is forced to a disk:
// what records are about ends with the machine's run.
package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	suffix     = ".json"
	tempPrefix = "."
)

// Maker is the process that wrote a record. A process id alone comes around
// again; with the start time it does not.
type Maker struct {
	PID   int    `json:"pid"`
	Start string `json:"start"`
}

// ThisMaker is the calling process.
func ThisMaker() Maker { return MakerOf(os.Getpid()) }

// MakerOf is the process with this id.
func MakerOf(pid int) Maker { return Maker{pid, processStart(pid)} }

// Alive says whether that very process still runs.
func (m Maker) Alive() bool {
	start := processStart(m.PID)
	return start != "" && start == m.Start
}

// AliveElsewhere says whether another process than the caller's is at work.
func (m Maker) AliveElsewhere() bool { return m.PID != os.Getpid() && m.Alive() }

// processStart is field 22 of /proc/PID/stat, in clock ticks since boot, or ""
// when the process is gone or only waits to be reaped.
func processStart(pid int) string {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The command's name, in parentheses, may hold anything.
	f := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return ""
	}
	return f[19]
}

// Dir is a directory of records of type T.
type Dir[T any] struct{ Path string }

func (d Dir[T]) file(name string) string { return filepath.Join(d.Path, name+suffix) }

func (d Dir[T]) temp(name string) string { return filepath.Join(d.Path, tempPrefix+name+".tmp") }

// Read reads one record; an absent one is fs.ErrNotExist.
func (d Dir[T]) Read(name string) (T, error) { return read[T](d.file(name)) }

func read[T any](file string) (T, error) {
	var v T
	raw, err := os.ReadFile(file)
	if err == nil && !json.Valid(raw) { // only a crash of the machine leaves such
		err = fs.ErrNotExist
	}
	if err == nil {
		err = json.Unmarshal(raw, &v)
	}
	if err != nil {
		return v, fmt.Errorf("read record %s: %w", file, err)
	}
	return v, nil
}

// List reads all records in the order of their names. No directory is no
// records.
func (d Dir[T]) List() ([]T, error) {
	entries, err := os.ReadDir(d.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list records: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), suffix); ok && !strings.HasPrefix(name, tempPrefix) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	out := []T{}
	for _, name := range names {
		v, err := d.Read(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// Write replaces a record in one step: a reader sees the old one or the new
// one. The directory must exist.
func (d Dir[T]) Write(name string, v T) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	// One name at a time has one writer, so a killed one's file is overwritten.
	f, err := os.OpenFile(d.temp(name), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(raw, '\n'))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), d.file(name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// Forget removes a record, and what killed writers of it left; an absent one
// is success.
func (d Dir[T]) Forget(name string) error {
	for _, f := range []string{d.temp(name), d.file(name)} {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Sweep removes what killed writers left. Nobody may be writing.
func (d Dir[T]) Sweep() error {
	left, err := filepath.Glob(filepath.Join(d.Path, tempPrefix+"*.tmp"))
	for _, f := range left {
		err = errors.Join(err, os.Remove(f))
	}
	return err
}

// Locked runs fn while no other process is in Locked. It makes the directory, which
// nobody else may open: who can could lock it, and hold up all for good. Hold it for a few file operations, never while something is being made.
func (d Dir[T]) Locked(fn func() error) error {
	for {
		if err := os.MkdirAll(d.Path, 0o700); err != nil {
			return fmt.Errorf("make the directory of records: %w", err)
		}
		err := os.Chmod(d.Path, 0o700) // earlier versions let everybody in
		dir, openErr := os.Open(d.Path)
		if err = errors.Join(err, openErr); errors.Is(err, fs.ErrNotExist) {
			continue // dropped between the two
		}
		if err != nil {
			return fmt.Errorf("open the directory of records: %w", err)
		}
		if err := flock(int(dir.Fd())); err != nil {
			dir.Close()
			return fmt.Errorf("lock records %s: %w", d.Path, err)
		}
		here, err1 := dir.Stat()
		there, err2 := os.Stat(d.Path)
		if err1 != nil || err2 != nil || !os.SameFile(here, there) {
			dir.Close() // we waited for one that was dropped
			continue
		}
		defer dir.Close() // and with it the lock
		return fn()
	}
}

// Drop removes the directory, if it is there and has no records.
func (d Dir[T]) Drop() error {
	if _, err := os.Stat(d.Path); err != nil {
		return nil
	}
	return d.Locked(func() error {
		os.Remove(d.Path) // fails, as it should, while there are records
		return nil
	})
}

func flock(fd int) error {
	for {
		if err := unix.Flock(fd, unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
