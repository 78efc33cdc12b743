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
