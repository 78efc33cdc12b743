// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// Who reads of a metric finds it at /metrics. docs/observe.md has others, and says so.
func TestMetricsInTheDocsAreServed(t *testing.T) {
	source, err := os.ReadFile("metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	served := map[string]bool{}
	for _, m := range regexp.MustCompile(`"((?:mustang|kubeproxy)_[a-z_]+)"`).FindAllSubmatch(source, -1) {
		served[string(m[1])] = true
	}
	pages, _ := filepath.Glob("../../docs/*.md")
	named := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("`((?:mustang|kubeproxy)_[a-z_]+)`").FindAllSubmatch(text, -1) {
			if named++; !served[string(m[1])] && filepath.Base(page) != "observe.md" {
				t.Errorf("%s names %s, which the agent does not serve", page, m[1])
			}
		}
	}
	if named == 0 {
		t.Error("the pages name no metric")
	}
}
