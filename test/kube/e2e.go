// SPDX-License-Identifier: Apache-2.0

// This file runs Kubernetes' own network tests against a cluster.

package kube

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// The specs that every Kubernetes network must pass, and those that disturb a
// cluster or take minutes each.
const (
	ConformanceFocus = `\[sig-network\].*\[Conformance\]`
	DefaultSkip      = `\[Slow\]|\[Serial\]|\[Disruptive\]`
)

// E2E says which specs run, and how.
type E2E struct {
	Focus    string // regular expression over a spec's text
	Skip     string
	Parallel int           // specs at once
	Timeout  time.Duration // for all
	Output   string        // directory for the log and the JUnit file; "": one named after the time, in the cache
}

// Summary counts what a run of the suite did.
type Summary struct {
	Passed, Failed, Skipped int // skipped: chosen, and then found to need what is not there
	Failures                []string
	Output                  string // directory
	Took                    time.Duration
}

func (s *Summary) String() string {
	text := fmt.Sprintf("%d passed, %d failed, %d skipped in %.0f s; log and JUnit file: %s",
		s.Passed, s.Failed, s.Skipped, s.Took.Seconds(), s.Output)
	for _, failure := range s.Failures {
		text += "\n  failed: " + failure
	}
	return text
}

// imageSources tells the suite where images come from: all from registry.
var imageSources = []string{
	"buildImageRegistry", "cloudProviderGcpRegistry", "dockerLibraryRegistry", "gcAuthenticatedRegistry",
	"gcEtcdRegistry", "gcRegistry", "privateRegistry", "promoterE2eRegistry", "sigStorageRegistry",
}

// RunE2E runs the suite on the control plane's machine, from where it reaches
// nodes and pods as a user's machine would. Failed specs are no error.
func RunE2E(ctx context.Context, name string, run E2E, out io.Writer) (*Summary, error) {
	c, err := running(name)
	if err != nil {
		return nil, err
	}
	b, err := newBuilder(ctx, 1, io.Discard)
	if err != nil {
		return nil, err
	}
	if missing := b.missing(true); len(missing) > 0 {
		return nil, notBuilt(missing, " --e2e")
	}
	if run.Output == "" {
		cache, err := Cache()
		if err != nil {
			return nil, err
		}
		run.Output = filepath.Join(cache, "e2e", time.Now().Format("20060102-150405"))
	}
	if err := os.MkdirAll(run.Output, 0o755); err != nil {
		return nil, err
	}
	// Only this directory's content goes in and out: the machine may not see it.
	inside := c.path(ControlPlane, "root/var/e2e")
	if err := errors.Join(os.RemoveAll(inside), os.MkdirAll(inside, 0o755)); err != nil {
		return nil, err
	}
	var sources strings.Builder
	for _, source := range imageSources {
		fmt.Fprintf(&sources, "%s: %s\n", source, registry)
	}
	if err := writeFile(filepath.Join(inside, "images.yaml"), sources.String(), 0o644); err != nil {
		return nil, err
	}
	start := time.Now()
	runError := c.ginkgo(ctx, b, run, out)
	summary, err := readJUnit(filepath.Join(inside, "junit.xml"))
	if err != nil {
		return nil, errors.Join(runError, err)
	}
	summary.Took, summary.Output = time.Since(start), run.Output
	err = copyFile(filepath.Join(inside, "junit.xml"), filepath.Join(run.Output, "junit.xml"))
	if err == nil {
		err = writeFile(filepath.Join(run.Output, "summary.txt"), summary.String()+"\n", 0o644)
	}
	if summary.Failed == 0 && runError != nil {
		err = errors.Join(err, runError) // the suite itself failed
	}
	return summary, errors.Join(err, summary.nothing())
}

// nothing is the error of a run that tested nothing: a focus that no spec has, or a
// cluster in which each of them skipped itself.
func (s *Summary) nothing() error {
	if s.Passed+s.Failed > 0 {
		return nil
	}
	return fmt.Errorf("no spec ran: %s", s)
}

// ginkgo runs the suite with its output to out and to the log.
func (c *cluster) ginkgo(ctx context.Context, b *builder, run E2E, out io.Writer) error {
	log, err := os.Create(filepath.Join(run.Output, "e2e.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	command := []string{
		"enter", "--name", c.Config.Name, ControlPlane, "--", "env", "KUBE_TEST_REPO_LIST=/var/e2e/images.yaml",
		b.path("ginkgo", "ginkgo"), fmt.Sprintf("--procs=%d", max(run.Parallel, 1)), "--no-color", "--keep-going",
		"--focus=" + run.Focus, "--skip=" + run.Skip, "--timeout=" + run.Timeout.String(),
		"--output-interceptor-mode=none", "--output-dir=/var/e2e", "--junit-report=junit.xml",
		b.path("e2e", "e2e.test"), "--",
		"--kubeconfig=" + etcFile("admin.conf"), "--provider=skeleton", "--kubectl-path=" + b.path("hyperkube", "kubectl"),
		fmt.Sprintf("--num-nodes=%d", c.Config.Nodes), // else specs for two nodes skip themselves
		"--dump-logs-on-failure=false", "--delete-namespace-on-failure=true",
	}
	ctx, cancel := context.WithTimeout(ctx, run.Timeout+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, command...)
	cmd.Stdout = io.MultiWriter(out, log)
	cmd.Stderr = cmd.Stdout
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("e2e suite: %w", errors.Join(err, context.Cause(ctx)))
	}
	return nil
}

// readJUnit counts specs. Ginkgo lists every spec of the binary: those that
// the focus left out are "skipped" without a message.
func readJUnit(path string) (*Summary, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("the suite left no result: %w", err)
	}
	var report struct {
		Suites []struct {
			Cases []struct {
				Name    string `xml:"name,attr"`
				Status  string `xml:"status,attr"`
				Skipped *struct {
					Message string `xml:"message,attr"`
				} `xml:"skipped"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(content, &report); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	s := &Summary{}
	for _, suite := range report.Suites {
		for _, spec := range suite.Cases {
			switch {
			case spec.Status == "skipped" || spec.Status == "pending":
				if spec.Skipped != nil && strings.Contains(spec.Skipped.Message, " - ") {
					s.Skipped++
				}
			case spec.Status != "passed":
				s.Failed++
				s.Failures = append(s.Failures, spec.Name)
			case strings.HasPrefix(spec.Name, "[It]"): // not the suite's own set-up
				s.Passed++
			}
		}
	}
	return s, nil
}

func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, content, 0o644)
}
