// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"strings"
	"testing"
)

// A sysdump goes to strangers.
func TestASysdumpHasNoValuesOfEnvironments(t *testing.T) {
	const secret = "hunter2"
	text, err := withoutValues([]byte(`{"kind": "PodList", "items": [
		{"metadata": {"name": "web", "generation": 12345678901234567, "annotations": {"why": "kept",
			"kubectl.kubernetes.io/last-applied-configuration": "{\"value\":\"hunter2\"}",
			"objectset.rio.cattle.io/applied": "hunter2, packed", "example.com/as-it-was": "` + strings.Repeat(" ", 250) + `hunter2"}},
		 "spec": {"containers": [{"name": "web", "env": [{"name": "PASSWORD", "value": "hunter2"}, {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}],
		          "initContainers": [{"name": "set up", "env": [{"name": "PASSWORD", "value": "hunter2"}]}]}},
		{"spec": {"template": {"spec": {"containers": [{"env": [{"name": "PASSWORD", "value": "hunter2"}]}]}}}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), secret) {
		t.Errorf("a value of an environment is in it:\n%s", text)
	}
	for _, kept := range []string{`"PASSWORD"`, `"secretKeyRef"`, `"why":"kept"`, `"example.com/as-it-was":"left out`, "12345678901234567"} {
		if !strings.Contains(string(text), kept) {
			t.Errorf("%s is not in it:\n%s", kept, text)
		}
	}
	if _, err := withoutValues([]byte("no JSON")); err == nil {
		t.Error("what is no JSON was read")
	}
}
