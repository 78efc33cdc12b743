// SPDX-License-Identifier: Apache-2.0

// Command image builds mustang's container image: from scratch, without a
// container daemon, and the same bytes from the same source every time.
//
//	go run ./image --version 0.1.0 --arch amd64,arm64 --out ../../bin/image
//
// It leaves one archive an architecture, as `docker save` writes it: containerd
// (`ctr images import`), docker, podman and skopeo read it.
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// limit is how many bytes an image may have, before any compression.
const limit = 60 << 20

// programs are in /bin: the tool, whose agent is what the image starts, and the
// plugin that it installs.
var programs = []string{"mustang", "mustang-cni"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	f := flag.NewFlagSet("image", flag.ContinueOnError)
	version := f.String("version", "", "the image's tag")
	repository := f.String("repository", "mustang-net/mustang", "the image's name")
	arches := f.String("arch", "amd64,arm64", "architectures")
	dir := f.String("out", ".", "directory for the archives")
	source := f.String("source", "../..", "mustang's source")
	if err := f.Parse(args); err != nil {
		return err
	}
	tag, err := name.NewTag(*repository+":"+*version, name.WeakValidation)
	if err != nil {
		return fmt.Errorf("--repository and --version: %w", err)
	}
	if err := os.MkdirAll(*dir, 0o755); err != nil {
		return err
	}
	for arch := range strings.SplitSeq(*arches, ",") {
		archive := filepath.Join(*dir, fmt.Sprintf("mustang-%s-%s.tar", *version, arch))
		size, digest, err := build(ctx, *source, arch, tag, archive)
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		fmt.Fprintf(out, "%s  %.1f MB  %s\n", archive, float64(size)/1e6, digest)
	}
	return nil
}

// build makes one architecture's archive, and answers its image's size and
// digest.
func build(ctx context.Context, source, arch string, tag name.Tag, archive string) (int64, v1.Hash, error) {
	content, err := files(ctx, source, arch, tag.TagStr())
	if err != nil {
		return 0, v1.Hash{}, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil })
	if err != nil {
		return 0, v1.Hash{}, err
	}
	if len(content) > limit {
		return 0, v1.Hash{}, fmt.Errorf("the image has %d bytes, and may have %d", len(content), limit)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return 0, v1.Hash{}, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return 0, v1.Hash{}, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", arch
	config.Config = v1.Config{
		Entrypoint: []string{"/bin/mustang"}, Cmd: []string{"agent"}, Env: []string{"PATH=/bin"}, WorkingDir: "/",
		Labels: map[string]string{"org.opencontainers.image.title": "mustang", "org.opencontainers.image.version": tag.TagStr(), "org.opencontainers.image.licenses": "Apache-2.0"},
	}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return 0, v1.Hash{}, err
	}
	digest, err := image.Digest()
	if err != nil {
		return 0, digest, err
	}
	beside := archive + ".new"
	if err := tarball.WriteToFile(beside, tag, image); err != nil {
		return 0, digest, errors.Join(err, os.Remove(beside))
	}
	if err := os.Rename(beside, archive); err != nil {
		return 0, digest, err
	}
	return int64(len(content)), digest, nil
}

// files is the layer: the programs, and the directories that a program or a
// mount expects. Owners and times are zero, so that equal files are equal bytes.
func files(ctx context.Context, source, arch, version string) ([]byte, error) {
	tmp, err := os.MkdirTemp("", "mustang-image-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	put := func(h tar.Header, content []byte) {
		h.Size = int64(len(content))
		if err == nil {
			err = w.WriteHeader(&h)
		}
		if err == nil {
			_, err = w.Write(content)
		}
	}
	for _, dir := range []string{"bin/", "etc/", "etc/mustang/", "proc/", "run/", "sys/", "var/"} {
		put(tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}, nil)
	}
	put(tar.Header{Typeflag: tar.TypeSymlink, Name: "var/run", Linkname: "../run", Mode: 0o777}, nil)
	for _, program := range programs {
		if err != nil {
			return nil, err
		}
		var content []byte
		content, err = compile(ctx, source, arch, version, program, tmp)
		put(tar.Header{Typeflag: tar.TypeReg, Name: "bin/" + program, Mode: 0o755}, content)
	}
	return buf.Bytes(), errors.Join(err, w.Close())
}

// compile builds a static program whose bytes depend on the source alone.
func compile(ctx context.Context, source, arch, version, program, tmp string) ([]byte, error) {
	bin := filepath.Join(tmp, program+"-"+arch)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid= -X main.version="+version, "-o", bin, "./cmd/"+program)
	cmd.Dir = source
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=-mod=readonly", "GOWORK=off", "GOEXPERIMENT=")
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("build %s: %w", program, err)
	}
	return os.ReadFile(bin)
}
