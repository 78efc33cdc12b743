// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// Who reads of a metric finds it at /metrics.
func TestMetricsInTheDocsAreServed(t *testing.T) {
	served := map[string]bool{}
	for file, prefix := range map[string]string{"metrics.go": "", "../observe/collector.go": "mustang_"} {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`"([a-z_]+)"`).FindAllSubmatch(source, -1) {
			served[prefix+string(m[1])] = true
		}
	}
	pages, _ := filepath.Glob("../../docs/*.md")
	named := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("`((?:mustang|kubeproxy)_[a-z_]+)`").FindAllSubmatch(text, -1) {
			if named++; !served[string(m[1])] {
				t.Errorf("%s names %s, which the agent does not serve", page, m[1])
			}
		}
	}
	if named == 0 {
		t.Error("the pages name no metric")
	}
}

// A table that cannot be read hides no other metric: not who fails, nor for how long.
func TestMetricsWithoutTables(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		failures := func() float64 {
			t.Helper()
			all, err := w.agent.metrics.registry.Gather() // whose errors the server answers by 500
			must(t, err)
			for _, m := range all {
				if m.GetName() == "mustang_scrape_failures" {
					return m.GetMetric()[0].GetGauge().GetValue()
				}
			}
			t.Fatal("the failures are not told")
			return 0
		}
		if n := failures(); n != 0 {
			t.Errorf("%v failures, with all tables there", n)
		}
		must(t, os.RemoveAll(filepath.Join(w.config.BPFFS, "maps")))
		if n := failures(); n == 0 {
			t.Error("no failure, without tables")
		}
	})
}
