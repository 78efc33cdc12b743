// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"sigs.k8s.io/yaml"
)

// objects are what the chart gives with everything for monitoring switched on, by kind.
func objects(t *testing.T) map[string][]byte {
	t.Helper()
	on := map[string]any{"enabled": true}
	text, err := render("../..", "kube-system", map[string]any{"podMonitor": on, "alerts": on, "dashboard": on, "agent": map[string]any{"metrics-address": "[::]:10249"}})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]byte{}
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		var o struct {
			Kind     string
			Metadata struct{ Name string }
		}
		if err := yaml.Unmarshal(doc, &o); err != nil {
			t.Fatal(err)
		}
		found[o.Kind+" "+o.Metadata.Name] = doc
	}
	return found
}

// Of metrics that Prometheus does not reach alerts would be silent for ever.
func TestMonitoringNeedsMetrics(t *testing.T) {
	on := map[string]any{"enabled": true}
	for _, what := range []string{"podMonitor", "alerts", "dashboard"} {
		for address, reached := range map[any]bool{nil: false, "none": false, "127.0.0.1:10249": false, "[::1]:10249": false, "[::ffff:127.0.0.1]:10249": false,
			"[::]:10249": true, "0.0.0.0:10249": true, "192.0.2.7:10249": true, "[2001:db8::1]:10249": true} {
			_, err := render("../..", "kube-system", map[string]any{what: on, "agent": map[string]any{"metrics-address": address}})
			if ok := reached || what == "dashboard"; ok != (err == nil) || err != nil && !strings.Contains(err.Error(), "set agent.metrics-address=") {
				t.Errorf("%s.enabled with metrics at %v: %v", what, address, err)
			}
		}
	}
}

// TestMonitoring reads what the chart gives to Prometheus' operator with the
// operator's own types: a field that these do not have is an error.
func TestMonitoring(t *testing.T) {
	all := objects(t)
	var monitor monitoring.PodMonitor
	if err := yaml.UnmarshalStrict(all["PodMonitor mustang"], &monitor); err != nil {
		t.Fatalf("PodMonitor: %v", err)
	}
	var agents struct {
		Spec struct {
			Template struct {
				Metadata struct{ Labels map[string]string }
				Spec     struct {
					Containers []struct{ Ports []struct{ Name string } }
				}
			}
		}
	}
	if err := yaml.Unmarshal(all["DaemonSet mustang"], &agents); err != nil {
		t.Fatal(err)
	}
	for name, value := range monitor.Spec.Selector.MatchLabels {
		if got := agents.Spec.Template.Metadata.Labels[name]; got != value {
			t.Errorf("the PodMonitor selects %s=%s, agents have %q", name, value, got)
		}
	}
	if len(monitor.Spec.PodMetricsEndpoints) != 1 || *monitor.Spec.PodMetricsEndpoints[0].Port != agents.Spec.Template.Spec.Containers[0].Ports[0].Name {
		t.Errorf("the PodMonitor asks at %+v, agents serve at %+v", monitor.Spec.PodMetricsEndpoints, agents.Spec.Template.Spec.Containers[0].Ports)
	}

	var rule monitoring.PrometheusRule
	if err := yaml.UnmarshalStrict(all["PrometheusRule mustang"], &rule); err != nil {
		t.Fatalf("PrometheusRule: %v", err)
	}
	count := 0
	for _, group := range rule.Spec.Groups {
		for _, r := range group.Rules {
			count++
			expression(t, r.Alert, r.Expr.String())
			if r.For != nil {
				if _, err := model.ParseDuration(string(*r.For)); err != nil {
					t.Errorf("%s: for: %v", r.Alert, err)
				}
			}
			if r.Annotations["summary"] == "" || r.Labels["severity"] == "" {
				t.Errorf("%s: no summary, or no severity", r.Alert)
			}
		}
	}
	if count == 0 {
		t.Error("there are no alerts")
	}
}

var (
	leastRecentlyUsed = regexp.MustCompile(`BPF_MAP_TYPE_LRU_HASH\);[^}]*\} (mst_[a-z_]+_v[0-9]+)`)
	others            = regexp.MustCompile(`BPF_MAP_TYPE_HASH\);[^}]*\} (mst_[a-z_]+_v[0-9]+)`)
)

// TestAlertOfTableFill wants it for tables that refuse new entries. Those of flows
// keep what has ended until they need its room: they are full for good.
func TestAlertOfTableFill(t *testing.T) {
	source, err := os.ReadFile("../../../bpf/maps.h")
	if err != nil {
		t.Fatal(err)
	}
	var rule monitoring.PrometheusRule
	if err := yaml.UnmarshalStrict(objects(t)["PrometheusRule mustang"], &rule); err != nil {
		t.Fatal(err)
	}
	parsed, err := parser.ParseExpr(rule.Spec.Groups[0].Rules[0].Expr.String())
	if err != nil || rule.Spec.Groups[0].Rules[0].Alert != "MustangTableFills" {
		t.Fatalf("%+v: %v", rule.Spec.Groups[0].Rules[0], err)
	}
	asked := func(table string) bool {
		yes := true
		parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
			if s, ok := node.(*parser.VectorSelector); ok {
				for _, m := range s.LabelMatchers {
					yes = yes && (m.Name != "table" || m.Matches(table))
				}
			}
			return nil
		})
		return yes
	}
	for want, kind := range map[bool]*regexp.Regexp{false: leastRecentlyUsed, true: others} {
		tables := kind.FindAllSubmatch(source, -1)
		if len(tables) < 3 {
			t.Errorf("bpf/maps.h has %d of %s", len(tables), kind)
		}
		for _, m := range tables {
			if asked(string(m[1])) != want {
				t.Errorf("the alert is about %s: %v", m[1], !want)
			}
		}
	}
}

// TestDashboard reads each panel's queries as Grafana sends them.
func TestDashboard(t *testing.T) {
	var config struct{ Data map[string]string }
	if err := yaml.Unmarshal(objects(t)["ConfigMap mustang-dashboard"], &config); err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
			GridPos struct{ W, H int }
		}
	}
	if err := json.Unmarshal([]byte(config.Data["mustang.json"]), &board); err != nil {
		t.Fatal(err)
	}
	count := 0
	for _, panel := range board.Panels {
		if panel.Title == "" || panel.GridPos.W < 1 || panel.GridPos.H < 1 {
			t.Errorf("a panel without title or place: %+v", panel)
		}
		for _, target := range panel.Targets {
			count++
			expression(t, panel.Title, strings.NewReplacer("$__rate_interval", "1m", "$__range", "1h", "$node", ".*").Replace(target.Expr))
		}
	}
	if count == 0 {
		t.Error("there are no queries")
	}
}

var declared = regexp.MustCompile(`"((?:mustang|kubeproxy)_[a-z_]+)"`)

// ours are the names of metrics in mustang's source.
func ours(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, dir := range []string{"agent", "observe"} {
		files, err := filepath.Glob("../../../internal/" + dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range declared.FindAllSubmatch(text, -1) {
				names[string(m[1])] = true
			}
		}
	}
	return names
}

// expression wants PromQL whose metrics exist: mustang's, or one of another
// exporter that is meant.
func expression(t *testing.T, where, text string) {
	t.Helper()
	parsed, err := parser.ParseExpr(text)
	if err != nil {
		t.Errorf("%s: %s: %v", where, text, err)
		return
	}
	known := ours(t)
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		name := selector.Name
		for _, m := range selector.LabelMatchers {
			if m.Name == labels.MetricName {
				name = m.Value
			}
		}
		base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		if !known[base] && name != "kube_daemonset_status_number_unavailable" && !strings.HasPrefix(name, "process_") && !strings.HasPrefix(name, "go_") {
			t.Errorf("%s asks for %s, which nobody exports", where, name)
		}
		return nil
	})
}
