// SPDX-License-Identifier: Apache-2.0

// Command manifest renders mustang's Helm chart as `helm template` does, values
// checked by the chart's schema.
//
//	go run ./manifest > manifest.yaml
//	go run ./manifest --set apiServer=10.0.0.1:6443 --set agent.node-mode=vxlan
//	go run ./manifest --write        # deploy/mustang.yaml and deploy/uninstall.yaml
//	go run ./manifest --check        # that those two are what the chart gives
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"helm.sh/helm/v3/pkg/strvals"
	"sigs.k8s.io/yaml"
)

// manifests are the generated files beside the chart, and the values that make
// each of them.
var manifests = map[string]string{"mustang.yaml": "uninstall=false", "uninstall.yaml": "uninstall=true"}

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "manifest:", err)
		os.Exit(1)
	}
}

// list is a flag that may be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func run(args []string, out io.Writer) error {
	f := flag.NewFlagSet("manifest", flag.ContinueOnError)
	var set, files list
	deploy := f.String("deploy", "..", "the directory with the chart")
	namespace := f.String("namespace", "kube-system", "where it is to run")
	write := f.Bool("write", false, "write the manifests beside the chart")
	check := f.Bool("check", false, "compare the manifests beside the chart")
	f.Var(&set, "set", "NAME=VALUE over the chart's values; repeat")
	f.Var(&files, "values", "file with values; repeat")
	if err := f.Parse(args); err != nil {
		return err
	}
	values := map[string]any{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var more map[string]any
		if err := yaml.Unmarshal(text, &more); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		values = chartutil.CoalesceTables(more, values)
	}
	for _, s := range set {
		if err := strvals.ParseInto(s, values); err != nil {
			return fmt.Errorf("--set %s: %w", s, err)
		}
	}
	if !*write && !*check {
		text, err := render(*deploy, *namespace, values)
		if err == nil {
			_, err = out.Write(text)
		}
		return err
	}
	return generated(*deploy, *namespace, *check)
}

// generated writes the manifests beside the chart, or compares them.
func generated(deploy, namespace string, check bool) error {
	var errs []error
	for name, set := range manifests {
		values := map[string]any{}
		if err := strvals.ParseInto(set, values); err != nil {
			return err
		}
		text, err := render(deploy, namespace, values)
		if err != nil {
			return err
		}
		file := filepath.Join(deploy, name)
		if !check {
			errs = append(errs, os.WriteFile(file, text, 0o644))
			continue
		}
		have, err := os.ReadFile(file)
		if err == nil && !bytes.Equal(have, text) {
			err = fmt.Errorf("%s is not what the chart gives; run `make manifests` and commit", file)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// render is what `helm template mustang deploy/chart/mustang` prints.
func render(deploy, namespace string, values map[string]any) ([]byte, error) {
	chart, err := loader.Load(filepath.Join(deploy, "chart/mustang"))
	if err != nil {
		return nil, err
	}
	options := chartutil.ReleaseOptions{Name: "mustang", Namespace: namespace, Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, values, options, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	for name := range files {
		if ext := path.Ext(name); ext != ".yaml" {
			delete(files, name) // helpers and notes
		}
	}
	_, objects, err := releaseutil.SortManifests(files, chartutil.DefaultVersionSet, releaseutil.InstallOrder)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	out.WriteString("# SPDX-License-Identifier: Apache-2.0\n# Generated from deploy/chart/mustang by `make manifests`.\n")
	for _, o := range objects {
		fmt.Fprintf(&out, "---\n%s\n", strings.TrimSpace(o.Content))
	}
	return out.Bytes(), nil
}
