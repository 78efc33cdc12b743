// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"os"
	"path/filepath"
	"testing"
)

// Specs that the focus left out, or that skipped themselves, are no success.
func TestASuiteThatRanNothingIsAnError(t *testing.T) {
	for name, c := range map[string]struct {
		cases   string
		want    Summary
		nothing bool
	}{
		"one passed": {`<testcase name="[It] a" status="passed"/><testcase name="[It] b" status="skipped"><skipped message="skipped"/></testcase>`, Summary{Passed: 1}, false},
		"one failed": {`<testcase name="[It] a" status="failed"/>`, Summary{Failed: 1}, false},
		"set-up alone": {`<testcase name="[SynchronizedBeforeSuite]" status="passed"/>
			<testcase name="[It] a" status="skipped"><skipped message="skipped - needs three nodes"/></testcase>`, Summary{Skipped: 1}, true},
	} {
		file := filepath.Join(t.TempDir(), "junit.xml")
		if err := os.WriteFile(file, []byte(`<testsuites><testsuite>`+c.cases+`</testsuite></testsuites>`), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := readJUnit(file)
		if err != nil {
			t.Fatal(err)
		}
		if s.Passed != c.want.Passed || s.Failed != c.want.Failed || s.Skipped != c.want.Skipped || (s.nothing() != nil) != c.nothing {
			t.Errorf("%s: %v, error %v", name, s, s.nothing())
		}
	}
}
