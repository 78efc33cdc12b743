// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// ScopeFile says by its content where the pins are that the store is about. Whoever works on
// the scope has it locked: the directory itself is locked by others, for less long.
func (s Store) ScopeFile() string { return filepath.Join(s.dir, scopeFile) }

// OpenScope opens the ScopeFile to lock it, and makes it where there is none; existing: then it is nil.
func (s Store) OpenScope(existing bool) (*os.File, error) {
	if existing {
		if err := s.checkOwner(); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(s.ScopeFile(), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return f, err
	}
	for {
		if err := s.Make(); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(s.ScopeFile(), os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			continue // another tool has just removed the directory
		}
		if err != nil {
			return nil, fmt.Errorf("write state: %w", err)
		}
		return f, nil
	}
}

// BPFFS is where the pins are that the store is about; "": it does not say, as those of earlier versions.
func (s Store) BPFFS() (string, error) {
	if err := s.checkOwner(); err != nil {
		return "", err
	}
	text, err := os.ReadFile(s.ScopeFile())
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(text), err
}

// SetBPFFS writes it, into the ScopeFile that the caller has locked: another file in its place would not be.
func SetBPFFS(locked *os.File, dir string) error {
	_, err := locked.WriteAt([]byte(dir), 0)
	if err == nil {
		err = locked.Truncate(int64(len(dir)))
	}
	if err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}
