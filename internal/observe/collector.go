// SPDX-License-Identifier: Apache-2.0

package observe

// Metrics: what the kernel's tables count, read when somebody asks.

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("mustang_"+name, help, labels, nil)
}

var (
	trafficPackets = desc("endpoint_packets_total", "Packets of an endpoint; direction is from_pod or to_pod.", "endpoint", "pod", "direction")
	trafficBytes   = desc("endpoint_bytes_total", "Bytes of an endpoint; direction is from_pod or to_pod.", "endpoint", "pod", "direction")

	endpointCount = desc("endpoints", "Endpoints of this node, by where their programs sit.", "placement")
	serviceCount  = desc("services", "Frontends in the datapath: address, port, protocol.")
	backendCount  = desc("backends", "Distinct backends in the datapath.")
	events        = desc("events_total", "Events of flows: told to a reader, held back by the limits (limited), or lost because a reader's ring was full (lost).", "result")
	lookFailures  = desc("observe_failures", "Tables that this scrape could not read; 0 is healthy.")
)

// collector reads the tables of a node. It is a prometheus.Collector.
type collector struct {
	bpffs, stateDir string
	*Node           // while it collects
}

// NewCollector is the metrics of the node whose pins are in bpffs and whose records
// are in stateDir: pods' traffic, and what was told of flows. Each scrape reads the
// tables anew, without the scope's lock; it keeps nothing.
func NewCollector(bpffs, stateDir string) prometheus.Collector {
	return collector{bpffs: bpffs, stateDir: stateDir}
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{trafficPackets, trafficBytes, endpointCount, serviceCount, backendCount, events, lookFailures} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. What cannot be read is left out and
// counted: one bad table must not hide the others.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	n, err := Open(c.bpffs, c.stateDir)
	if err != nil {
		gauge(ch, lookFailures, 1)
		return
	}
	defer n.Close()
	c.Node = n
	failures := 0
	for _, part := range []func(chan<- prometheus.Metric) error{c.traffic, c.services, c.events} {
		if part(ch) != nil {
			failures++
		}
	}
	gauge(ch, lookFailures, float64(failures))
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func counter(ch chan<- prometheus.Metric, d *prometheus.Desc, v uint64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

func (c collector) traffic(ch chan<- prometheus.Metric) error {
	list, err := c.endpoints()
	if err != nil {
		return err
	}
	placed := map[state.Placement]int{state.HostEnd: 0, state.InPod: 0}
	for id, ep := range list {
		placed[ep.Placement]++
		from, to, err := c.dp.Traffic(id)
		if err != nil {
			return err
		}
		number, pod := strconv.FormatUint(uint64(id), 10), podName(ep)
		counter(ch, trafficPackets, from.Packets, number, pod, "from_pod")
		counter(ch, trafficPackets, to.Packets, number, pod, "to_pod")
		counter(ch, trafficBytes, from.Bytes, number, pod, "from_pod")
		counter(ch, trafficBytes, to.Bytes, number, pod, "to_pod")
	}
	for placement, n := range placed {
		gauge(ch, endpointCount, float64(n), string(placement))
	}
	return nil
}

func (c collector) services(ch chan<- prometheus.Metric) error {
	services, err := c.dp.Frontends.Count(func(key datapath.FrontendKey, _ datapath.Frontend) bool {
		return key.Proto != 0 && key.Scope == bpfgen.ScopeAny
	})
	if err != nil {
		return err
	}
	gauge(ch, serviceCount, float64(services))
	backends, err := c.dp.Backends.Count(func(uint32, datapath.Backend) bool { return true })
	if err != nil {
		return err
	}
	gauge(ch, backendCount, float64(backends))
	return nil
}

func (c collector) events(ch chan<- prometheus.Metric) error {
	n, err := c.dp.EventTotals()
	if err != nil {
		return err
	}
	counter(ch, events, n.Told, "told")
	counter(ch, events, n.Limited, "limited")
	counter(ch, events, n.Lost, "lost")
	return nil
}
