// SPDX-License-Identifier: Apache-2.0

// This file builds what a cluster is made of, once: every result is kept under
// a hash of what it was made from, so that a second build finds it, and so
// that two checkouts can share a cache.

package kube

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// recipe says how one artifact is made. Its hash covers the inputs, the
// artifacts it needs, and this package's files that make it.
type recipe struct {
	name   string
	needs  []string // artifacts, listed before it
	inputs []string // files below test/kube, with globs, or absolute ones
	files  []string // what it leaves in its directory; the rest is removed
	make   func(b *builder, out string) error
	e2e    bool // only RunE2E needs it
}

const (
	kubernetesModule = "modules/kubernetes"
	corednsModule    = "modules/coredns"
)

var recipes = []recipe{
	{
		name: "hyperkube", inputs: []string{kubernetesModule + "/go.*", kubernetesModule + "/hyperkube/*"}, files: programs,
		make: makeHyperkube,
	},
	{
		name: "coredns", inputs: []string{corednsModule + "/*"}, files: []string{"coredns"},
		make: func(b *builder, out string) error { return b.goBuild(corednsModule, out, "coredns", ".") },
	},
	{
		name: "agnhost", inputs: []string{kubernetesModule + "/go.*"}, files: []string{"agnhost"},
		make: func(b *builder, out string) error {
			return b.goBuild(kubernetesModule, out, "agnhost", "k8s.io/kubernetes/test/images/agnhost")
		},
	},
	{name: "pause.tar", inputs: []string{kubernetesModule + "/go.mod", "image*.go"}, files: []string{"pause.tar"}, make: makePause},
	{name: "busybox.tar", inputs: []string{busybox, "image*.go"}, files: []string{"busybox.tar"}, make: makeBusybox},
	{name: "coredns.tar", needs: []string{"coredns"}, inputs: []string{"image*.go"}, files: []string{"coredns.tar"}, make: makeCorednsImage},
	{
		name: "agnhost.tar", needs: []string{"agnhost", "coredns"}, inputs: append([]string{"image*.go"}, userlandFiles()...),
		files: []string{"agnhost.tar"}, make: makeAgnhostImage,
	},
	{
		name: "ginkgo", e2e: true, inputs: []string{kubernetesModule + "/go.*"}, files: []string{"ginkgo"},
		make: func(b *builder, out string) error {
			return b.goBuild(kubernetesModule, out, "ginkgo", "github.com/onsi/ginkgo/v2/ginkgo")
		},
	},
	{
		name: "e2e", e2e: true, inputs: []string{kubernetesModule + "/go.*", kubernetesModule + "/e2e/*"}, files: []string{"e2e.test"},
		make: func(b *builder, out string) error { return b.goBuild(kubernetesModule, out, "e2e.test", "./e2e") },
	},
}

// images are imported into every node.
var images = []string{"pause.tar", "busybox.tar", "coredns.tar", "agnhost.tar"}

// programs are hyperkube and its other names.
var programs = []string{
	"hyperkube", "etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet",
}

func userlandFiles() []string {
	var files []string
	for _, program := range userland {
		files = append(files, program)
	}
	slices.Sort(files)
	return slices.Compact(files)
}

type builder struct {
	ctx    context.Context
	source string // test/kube
	store  string
	jobs   int
	out    io.Writer
	keys   map[string]string
}

func newBuilder(ctx context.Context, jobs int, out io.Writer) (*builder, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	cache, err := Cache()
	if err != nil {
		return nil, err
	}
	b := &builder{
		ctx: ctx, source: filepath.Join(root, "test/kube"), store: filepath.Join(cache, "store"),
		jobs: max(jobs, 1), out: out, keys: map[string]string{},
	}
	for _, r := range recipes {
		if b.keys[r.name], err = b.key(r); err != nil {
			return nil, fmt.Errorf("hash the inputs of %s: %w", r.name, err)
		}
	}
	return b, nil
}

// key hashes what r is made from. A file of this machine that is missing
// counts as empty: it is the build that must complain.
func (b *builder) key(r recipe) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, r.name, Version, runtime.Version(), runtime.GOARCH)
	for _, need := range r.needs {
		fmt.Fprintln(h, need, b.keys[need])
	}
	for _, input := range r.inputs {
		if !filepath.IsAbs(input) {
			input = filepath.Join(b.source, input)
		}
		paths, err := filepath.Glob(input)
		if err != nil {
			return "", err
		}
		for _, p := range paths {
			content, err := os.ReadFile(p)
			if err != nil {
				return "", err
			}
			fmt.Fprintln(h, filepath.Base(p), digest(content))
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

func (b *builder) dir(name string) string { return filepath.Join(b.store, name+"-"+b.keys[name]) }

// path is where an artifact's file is, or will be.
func (b *builder) path(name, file string) string { return filepath.Join(b.dir(name), file) }

func (b *builder) missing(e2e bool) []string {
	var missing []string
	for _, r := range recipes {
		if r.e2e && !e2e {
			continue
		}
		if _, err := os.Stat(b.dir(r.name)); err != nil {
			missing = append(missing, r.name)
		}
	}
	return missing
}

// Missing names what must be built before a cluster can start: artifacts of
// the cache, and Debian packages.
func Missing() ([]string, error) {
	b, err := newBuilder(context.Background(), 1, io.Discard)
	if err != nil {
		return nil, err
	}
	return append(b.missing(false), missingPackages()...), nil
}

// MissingE2E names what must be built before RunE2E besides what a cluster needs.
func MissingE2E() ([]string, error) {
	b, err := newBuilder(context.Background(), 1, io.Discard)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(b.missing(true), func(name string) bool { return !ofSuite(name) }), nil
}

func ofSuite(name string) bool {
	return slices.ContainsFunc(recipes, func(r recipe) bool { return r.name == name && r.e2e })
}

// BuildOptions say what is built, and how.
type BuildOptions struct {
	E2E    bool          // the end-to-end suite too
	Jobs   int           // compilers at once
	Within time.Duration // 0: as long as it takes; Debian packages are installed before that begins
}

// ErrTime is a build that did not end within its time. What is built stays, and
// the compiler keeps what it has done: the next build goes on from there.
var ErrTime = errors.New("the time to build Kubernetes is over")

// Build makes what is missing. It installs Debian packages, and yields the
// processor to everybody else. An ErrTime says what go test will leave out.
func Build(ctx context.Context, o BuildOptions, out io.Writer) error {
	if err := installPackages(ctx, out); err != nil {
		return err
	}
	if o.Within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.Within)
		defer cancel()
	}
	b, err := newBuilder(ctx, o.Jobs, out) // after the packages: their programs are inputs
	if err != nil {
		return err
	}
	err = b.all(o.E2E)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		missing := b.missing(o.E2E)
		return fmt.Errorf("%w (%v): %s not there yet, so go test leaves out %s; the next build goes on from here",
			ErrTime, o.Within, strings.Join(missing, ", "), leftOut(missing))
	}
	if unable := CheckMachine(); err == nil && unable != nil {
		fmt.Fprintln(out, "no cluster can start on this machine:", unable)
	}
	return err
}

// leftOut names the tests that need one of the missing artifacts.
func leftOut(missing []string) string {
	switch {
	case slices.Contains(missing, "hyperkube"):
		return "test/agent and all clusters of test/kube"
	case slices.ContainsFunc(missing, func(name string) bool { return !ofSuite(name) }):
		return "all clusters of test/kube"
	default:
		return "upstream's conformance in test/kube"
	}
}

// all builds what is missing, and says what each took.
func (b *builder) all(e2e bool) error {
	missing := b.missing(e2e)
	for _, r := range recipes {
		if !slices.Contains(missing, r.name) {
			continue
		}
		start := time.Now()
		fmt.Fprintf(b.out, "%-12s", r.name)
		err := b.build(r)
		fmt.Fprintf(b.out, " %6.1f s\n", time.Since(start).Seconds())
		if err != nil {
			return fmt.Errorf("build %s: %w", r.name, err)
		}
	}
	fmt.Fprintf(b.out, "%d artifacts built, the others were there: %s\n", len(missing), b.store)
	return nil
}

// build makes r beside its place and renames it there, so that what is in the
// store is whole.
func (b *builder) build(r recipe) error {
	if err := os.MkdirAll(b.store, 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(b.store, ".building-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := r.make(b, tmp); err != nil {
		return err
	}
	entries, err := os.ReadDir(tmp)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !slices.Contains(r.files, e.Name()) {
			if err := os.Remove(filepath.Join(tmp, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	if err := os.Rename(tmp, b.dir(r.name)); err != nil && !isDir(b.dir(r.name)) {
		return err // else another build was first
	}
	return nil
}

func makeHyperkube(b *builder, out string) error {
	if err := b.goBuild(kubernetesModule, out, "hyperkube", "./hyperkube"); err != nil {
		return err
	}
	for _, name := range programs[1:] {
		if err := os.Symlink("hyperkube", filepath.Join(out, name)); err != nil {
			return err
		}
	}
	return nil
}

// goBuild compiles a package of a nested module; a name that ends in .test is
// a test binary.
func (b *builder) goBuild(module, out, name, pkg string) error {
	args := []string{"build"}
	if strings.HasSuffix(name, ".test") {
		args = []string{"test", "-c"}
	}
	// The e2e suite and kubectl compare versions: an unstamped one is v0.0.0.
	ldflags := "-s -w"
	for _, p := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, stamp := range []string{
			"gitVersion=" + Version, "gitMajor=1", "gitMinor=" + strings.Split(Version, ".")[1],
			"gitTreeState=clean", "gitCommit=mustang", "buildDate=1970-01-01T00:00:00Z",
		} {
			ldflags += " -X " + p + "." + stamp
		}
	}
	// What the linker strips, the compiler need not write: an eighth of its time.
	args = append(args, "-p", fmt.Sprint(b.jobs), "-buildvcs=false", "-trimpath", "-gcflags", "all=-dwarf=false", "-ldflags", ldflags, "-o", filepath.Join(out, name), pkg)
	return b.run(module, "go", args...)
}

// run runs a command at the lowest priority in a directory of test/kube; what
// it prints is only worth reading when it fails.
func (b *builder) run(dir, name string, args ...string) error {
	cmd := exec.CommandContext(b.ctx, "nice", append([]string{"-n", "19", name}, args...)...)
	cmd.Dir = filepath.Join(b.source, dir)
	tmp, err := os.MkdirTemp(b.store, ".tmp-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOTMPDIR="+tmp)
	// Compilers end with go: it neither ends them nor removes what it keeps.
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, args[0], err, tail(log.Bytes(), 2000))
	}
	return nil
}

// kubernetesSource is the directory of the module k8s.io/kubernetes.
func (b *builder) kubernetesSource() (string, error) {
	cmd := exec.CommandContext(b.ctx, "go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes")
	cmd.Dir = filepath.Join(b.source, kubernetesModule)
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("find the source of Kubernetes: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&fs.ModeDir != 0
}
