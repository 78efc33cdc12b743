// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// What the image starts finds there all that it is linked with, whichever busybox this machine has.
func TestBusyboxRunsInItsImage(t *testing.T) {
	if _, err := os.Stat(busybox); err != nil || os.Geteuid() != 0 {
		t.Skipf("it takes root, to change into the image's files, and the package busybox or busybox-static: %v", err)
	}
	dir := t.TempDir()
	if err := makeBusybox(nil, dir); err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(filepath.Join(dir, "busybox.tar"))
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "root")
	for files := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := files.Next()
		if err != nil {
			t.Fatal(err)
		}
		if h.Name == "layer.tar" {
			unpack(t, root, files)
			break
		}
	}
	cmd := exec.Command("/bin/sh", "-c", "echo works")
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: root}
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "works\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func unpack(t *testing.T, root string, layer io.Reader) {
	t.Helper()
	for files := tar.NewReader(layer); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		path := ""
		if err == nil {
			path = filepath.Join(root, h.Name)
			switch h.Typeflag {
			case tar.TypeDir:
				err = os.MkdirAll(path, 0o755)
			case tar.TypeSymlink:
				err = os.Symlink(h.Linkname, path)
			default:
				var text []byte
				if text, err = io.ReadAll(files); err == nil {
					err = os.WriteFile(path, text, os.FileMode(h.Mode))
				}
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
