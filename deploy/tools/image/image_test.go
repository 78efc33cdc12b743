// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// TestSameBytes builds both architectures' images here and from a copy of the
// source in another place, and wants the same archives.
func TestSameBytes(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds mustang for two architectures: not in short mode")
	}
	first, second, source := t.TempDir(), t.TempDir(), t.TempDir()
	if err := copyTree("../../..", source); err != nil {
		t.Fatal(err)
	}
	for dir, from := range map[string]string{first: "../../..", second: source} {
		if err := run(t.Context(), []string{"--version", "0.0.1-test", "--out", dir, "--source", from}, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	for arch, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		name := "mustang-0.0.1-test-" + arch + ".tar"
		a, err := os.ReadFile(filepath.Join(first, name))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(second, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s: two builds differ", name)
		}
		content(t, filepath.Join(first, name), arch, machine)
	}
}

// copyTree copies what mustang is built from.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name != "." && (strings.HasPrefix(d.Name(), ".") || name == "bin") {
				return filepath.SkipDir
			}
			return os.MkdirAll(filepath.Join(to, name), 0o755)
		}
		if !d.Type().IsRegular() {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, name), text, 0o644)
	})
}

// content wants static programs of the architecture, and nothing that is not named.
func content(t *testing.T, archive, arch string, machine elf.Machine) {
	t.Helper()
	image, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.Architecture != arch || config.OS != "linux" {
		t.Errorf("%s says that it is for %s %s", archive, config.OS, config.Architecture)
	}
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%s: %d layers, %v", archive, len(layers), err)
	}
	r, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var size int64
	found := map[string]bool{}
	for files := tar.NewReader(r); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		text, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		size += h.Size
		program := strings.TrimPrefix(h.Name, "bin/")
		found[program] = true
		static(t, archive+": "+program, text, machine)
	}
	if len(found) != len(programs) || !found["mustang"] || !found["mustang-cni"] {
		t.Errorf("%s has %v", archive, found)
	}
	if size > limit {
		t.Errorf("%s has %d bytes", archive, size)
	}
}

func static(t *testing.T, what string, program []byte, machine elf.Machine) {
	t.Helper()
	f, err := elf.NewFile(bytes.NewReader(program))
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if f.Machine != machine {
		t.Errorf("%s is for %v", what, f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			t.Errorf("%s is not static", what)
		}
	}
}
