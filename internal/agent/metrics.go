// SPDX-License-Identifier: Apache-2.0

package agent

// What is scraped: kube-proxy's names where it has them, with its meaning, and
// ours beside.

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/observe"
)

type metrics struct {
	registry *prometheus.Registry
	started  time.Time
	lastSync atomic.Int64 // Unix nanoseconds

	syncDuration    prometheus.Histogram
	programming     prometheus.Histogram
	applyDelay      prometheus.Histogram
	policyDelay     prometheus.Histogram
	addDelay        prometheus.Histogram
	serviceChanges  prometheus.Counter
	endpointChanges prometheus.Counter
	failures        prometheus.Counter
	healthz, livez  *prometheus.CounterVec
	readyz          *prometheus.CounterVec
}

func newMetrics(a *Agent) *metrics {
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	codes := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"code"})
	}
	// A change takes well under a millisecond, and a bad day seconds.
	fine := prometheus.ExponentialBuckets(0.0001, 2, 18)
	m := &metrics{
		registry: prometheus.NewRegistry(), started: time.Now(),
		syncDuration: histogram("kubeproxy_sync_proxy_rules_duration_seconds", "Time of one application of changes to the tables.", fine),
		programming: histogram("kubeproxy_network_programming_duration_seconds",
			"From the time that a slice gives for its change to the tables.", append(fine, 30, 60, 120, 300)),
		applyDelay:      histogram("mustang_apply_delay_seconds", "From the arrival of a change to the tables.", fine),
		policyDelay:     histogram("mustang_policy_apply_delay_seconds", "From the arrival of a pod, namespace or NetworkPolicy to the tables.", fine),
		addDelay:        histogram("mustang_policy_add_delay_seconds", "From when a new pod's labels are known, and it is asked for, to its policy being in force.", fine),
		serviceChanges:  counter("kubeproxy_sync_proxy_rules_service_changes_total", "Services looked at anew."),
		endpointChanges: counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "EndpointSlices looked at anew."),
		failures:        counter("mustang_apply_failures_total", "Changes that could not be applied and are tried again."),
		healthz:         codes("kubeproxy_proxy_healthz_total", "Answers of /healthz by status."),
		readyz:          codes("mustang_readyz_total", "Answers of /readyz by status."),
		livez:           codes("kubeproxy_proxy_livez_total", "Answers of /livez by status."),
	}
	m.registry.MustRegister(m.syncDuration, m.programming, m.applyDelay, m.policyDelay, m.addDelay, m.serviceChanges, m.endpointChanges, m.failures,
		m.healthz, m.readyz, m.livez, tables{a}, observe.NewCollector(a.config.scope().BPFFS, a.config.scope().StateDir), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	gauge := func(name, help string, value func() float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	gauge("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "When changes were last applied.", func() float64 {
		return float64(m.lastSync.Load()) / 1e9
	})
	gauge("mustang_sync_age_seconds", "For how long the API server has not been followed; 0: it is.", func() float64 {
		return a.outage().Seconds()
	})
	gauge("mustang_synced", "1 when everything that there was at the start has been applied.", func() float64 {
		if a.sync.synced.Load() {
			return 1
		}
		return 0
	})
	gauge("mustang_services_with_problems", "Services that are not in force in whole.", func() float64 {
		return float64(a.problems.count(k8s.Services))
	})
	gauge("mustang_policies_with_problems", "NetworkPolicies that are not in force in whole.", func() float64 {
		return float64(a.problems.count(k8s.Policies))
	})
	gauge("mustang_policy_addresses_left_out", "Addresses of pods that did not fit into the table of identities: no rule allows them.", func() float64 {
		return float64(a.policies.leftOut.Load())
	})
	gauge("mustang_kubernetes_pods", "Pods that are watched.", func() float64 { return float64(a.watch.Pods.Len()) })
	gauge("mustang_kubernetes_policies", "NetworkPolicies that are watched.", func() float64 { return float64(a.watch.Policies.Len()) })
	gauge("mustang_kubernetes_services", "Services that are watched.", func() float64 { return float64(a.watch.Services.Len()) })
	gauge("mustang_kubernetes_slices", "EndpointSlices that are watched.", func() float64 { return float64(a.watch.Slices.Len()) })
	return m
}

// outage is for how long the API server has not been followed.
func (a *Agent) outage() time.Duration {
	since, _ := a.watch.Outage()
	if since.IsZero() {
		return 0
	}
	return time.Since(since)
}

// tables collects what the engine knows: table fill and drops. It reads the
// kernel's tables beside whoever changes them.
type tables struct{ a *Agent }

var (
	descUsed    = prometheus.NewDesc("mustang_table_entries", "Entries in use.", []string{"table"}, nil)
	descSize    = prometheus.NewDesc("mustang_table_size", "Entries that there is room for.", []string{"table"}, nil)
	descMemory  = prometheus.NewDesc("mustang_table_memory_bytes", "Kernel memory.", []string{"table"}, nil)
	descDrops   = prometheus.NewDesc("mustang_drops_total", "Packets dropped.", []string{"reason", "direction"}, nil)
	descPolicy  = prometheus.NewDesc("mustang_policy_problem", "1 for each NetworkPolicy that is not in force in whole.", []string{"namespace", "policy"}, nil)
	descUnheld  = prometheus.NewDesc("mustang_pod_without_endpoint", "1 for each pod that runs on this node without mustang's programs.", []string{"namespace", "pod"}, nil)
	descFailed  = prometheus.NewDesc("mustang_scrape_failures", "Kinds of tables that this scrape could not read in whole; 0 is healthy.", nil, nil)
	descProblem = prometheus.NewDesc("mustang_service_problem", "1 for each Service that is not in force in whole.", []string{"namespace", "service"}, nil)
)

// Describe implements prometheus.Collector.
func (tables) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descUsed, descSize, descMemory, descDrops, descPolicy, descUnheld, descProblem, descFailed} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. What cannot be read is left out and
// counted: one bad table must not hide all other metrics.
func (t tables) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	failures := 0
	list, err := t.a.engine.Tables()
	if err != nil {
		failures++
	}
	for _, table := range list {
		if table.Entries >= 0 {
			gauge(descUsed, float64(table.Entries), table.Name)
		}
		gauge(descSize, float64(table.Max), table.Name)
		gauge(descMemory, float64(table.Memory), table.Name)
	}
	drops, err := t.a.engine.Drops()
	if err != nil {
		failures++
	}
	for _, d := range drops {
		ch <- prometheus.MustNewConstMetric(descDrops, prometheus.CounterValue, float64(d.Packets), d.Reason, d.Direction)
	}
	held, err := t.a.engine.EndpointAddrs()
	if err != nil {
		failures++
	} else if t.a.config.CNIConfDir != None || len(held) > 0 { // else somebody else connects pods
		for _, k := range t.a.policies.unheld(held) {
			gauge(descUnheld, 1, k.Namespace, k.Name)
		}
	}
	gauge(descFailed, float64(failures))
	descs := map[k8s.Kind]*prometheus.Desc{k8s.Services: descProblem, k8s.Policies: descPolicy}
	for o := range t.a.problems.list() {
		gauge(descs[o.kind], 1, o.key.Namespace, o.key.Name)
	}
}

// nodeKey is this node's.
func (a *Agent) nodeKey() k8s.Key { return k8s.Key{Name: a.config.Node} }
