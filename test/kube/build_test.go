// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A build that may take no time says what is left out, and leaves nothing half-made.
func TestBuildOutOfTime(t *testing.T) {
	if missing := missingPackages(); len(missing) > 0 {
		t.Skipf("a build would first install %s", strings.Join(missing, ", "))
	}
	cache := t.TempDir()
	t.Setenv("MUSTANG_KUBE_CACHE", cache)
	var out strings.Builder
	err := Build(context.Background(), BuildOptions{E2E: true, Jobs: 1, Within: time.Nanosecond}, &out)
	if !errors.Is(err, ErrTime) || !strings.Contains(err.Error(), "test/agent and all clusters") {
		t.Errorf("%v, %s", err, out.String())
	}
	if left, err := os.ReadDir(filepath.Join(cache, "store")); err != nil || len(left) > 0 {
		t.Errorf("in the cache: %v, %v", left, err)
	}
}

func TestLeftOut(t *testing.T) {
	for missing, want := range map[string]string{
		"hyperkube ginkgo e2e": "test/agent and all clusters of test/kube",
		"coredns.tar e2e":      "all clusters of test/kube",
		"e2e":                  "upstream's conformance in test/kube",
	} {
		if got := leftOut(strings.Fields(missing)); got != want {
			t.Errorf("without %s: %s", missing, got)
		}
	}
}
