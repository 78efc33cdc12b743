// SPDX-License-Identifier: Apache-2.0

// This file makes container images without a container tool: one layer, in
// the archive format of `docker save`, which containerd imports.

package kube

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
)

// registry is the first part of every image's name. No such host exists, so
// that a node which lacks an image can never get another one from somewhere.
const registry = "mustang.test"

// imageConfig is the part of the OCI image configuration that we use.
type imageConfig struct {
	Entrypoint []string `json:",omitempty"`
	Cmd        []string `json:",omitempty"`
	Env        []string `json:",omitempty"`
	User       string   `json:",omitempty"`
}

// layer collects an image's files. The first error sticks and comes out of
// writeImage, so that a list of files reads as a list.
type layer struct {
	buf  bytes.Buffer
	tar  *tar.Writer
	seen map[string]bool
	err  error
}

func newLayer() *layer {
	l := &layer{seen: map[string]bool{"/": true, ".": true}}
	l.tar = tar.NewWriter(&l.buf)
	return l
}

// add writes one entry. The first of a name wins. Times and owners are zero,
// so that equal files give an equal image.
func (l *layer) add(h tar.Header, content []byte) {
	h.Name = path.Clean("/" + h.Name)[1:]
	if l.err != nil || l.seen[h.Name] {
		return
	}
	if dir := path.Dir(h.Name); !l.seen[dir] {
		l.dir(dir, 0o755)
	}
	l.seen[h.Name] = true
	h.Size = int64(len(content))
	if l.err = l.tar.WriteHeader(&h); l.err == nil {
		_, l.err = l.tar.Write(content)
	}
}

func (l *layer) dir(name string, mode int64) {
	l.add(tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}, nil)
}

func (l *layer) link(name, target string) {
	l.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

func (l *layer) text(name, content string) {
	l.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, []byte(content))
}

// file copies a file of this machine, following links.
func (l *layer) file(name, source string, mode int64) {
	content, err := os.ReadFile(source)
	if err != nil {
		l.err = errors.Join(l.err, err)
		return
	}
	l.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, content)
}

var sharedObject = regexp.MustCompile(`(/\S+) \(0x`)

// program copies one of this machine's programs with the shared objects that
// it is linked with.
func (l *layer) program(name, source string) {
	l.file(name, source, 0o755)
	// ldd fails for a static program: that one needs nothing.
	out, _ := exec.Command("ldd", source).Output()
	for _, m := range sharedObject.FindAllSubmatch(out, -1) {
		l.file(string(m[1]), string(m[1]), 0o755)
	}
}

// writeImage writes the archive to out.
func writeImage(out string, names []string, config imageConfig, l *layer) error {
	if err := errors.Join(l.err, l.tar.Close()); err != nil {
		return fmt.Errorf("image %s: %w", names[0], err)
	}
	type object = map[string]any
	const epoch = "1970-01-01T00:00:00Z"
	configJSON, err := json.Marshal(object{
		"architecture": "amd64", "os": "linux", "created": epoch, "config": config,
		"rootfs":  object{"type": "layers", "diff_ids": []string{digest(l.buf.Bytes())}},
		"history": []object{{"created": epoch, "created_by": "mustang test/kube"}},
	})
	if err != nil {
		return err
	}
	configName := digest(configJSON)[len("sha256:"):] + ".json"
	manifest, err := json.Marshal([]object{{"Config": configName, "RepoTags": names, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	f, err := os.Create(filepath.Clean(out))
	if err != nil {
		return err
	}
	defer f.Close()
	archive := &layer{tar: tar.NewWriter(io.Writer(f)), seen: map[string]bool{".": true}}
	archive.text("layer.tar", l.buf.String())
	archive.text(configName, string(configJSON))
	archive.text("manifest.json", string(manifest))
	return errors.Join(archive.err, archive.tar.Close(), f.Close())
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
