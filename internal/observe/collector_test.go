// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"net/netip"
	"runtime"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/dptest"
	"github.com/mustang-net/mustang/internal/state"
)

func TestMetricsAreWhatTheTablesSay(t *testing.T) {
	w := newWorld(t)
	client, server := w.veth(1, state.PathBoth), w.veth(2, state.PathBoth)
	w.services(server)
	w.serve(server)
	w.open()
	c := w.watch(WatchOptions{})
	w.check(talk(client, "tcp", netip.AddrPortFrom(server.IP4, serverPort)))
	w.sendFrames(client, false, dptest.Eth([6]byte{2, 9, 9, 9, 9, 9}, [6]byte(client.NodeMAC)).IP(client.IP4, server.IP4).UDP(1, 2).Frame())
	c.expect("the drop", func(f Flow) bool { return f.Reason == "spoofed_mac" })
	c.expect("the flow's end, which is counted, too", func(f Flow) bool { return f.Event == Closed })

	registry := prometheus.NewPedanticRegistry()
	w.check(registry.Register(NewCollector(w.scope.BPFFS, w.scope.StateDir)))
	families, err := registry.Gather()
	w.check(err)
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() {
				key += " " + l.GetName() + "=" + l.GetValue()
			}
			got[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	for key, want := range map[string]func(float64) bool{
		"mustang_endpoints placement=host": func(v float64) bool { return v == 2 },
		"mustang_endpoints placement=pod":  func(v float64) bool { return v == 0 },
		"mustang_services":                 func(v float64) bool { return v == 6 },
		"mustang_backends":                 func(v float64) bool { return v == 4 },
		"mustang_observe_failures":         func(v float64) bool { return v == 0 },
		"mustang_events_total result=told": func(v float64) bool { return v >= 3 },
		"mustang_endpoint_packets_total direction=from_pod endpoint=1 pod=shop/pod-1": func(v float64) bool { return v >= 4 },
		"mustang_endpoint_bytes_total direction=to_pod endpoint=2 pod=shop/pod-2":     func(v float64) bool { return v >= 200 },
	} {
		if v, there := got[key]; !there || !want(v) {
			t.Errorf("%s is %v (there: %t)", key, v, there)
		}
	}
	if t.Failed() {
		t.Log(got)
	}
}

// TestAScrapeTakesNoCopyOfTheTables: what a scrape allocates does not grow with what the
// tables hold.
func TestAScrapeTakesNoCopyOfTheTables(t *testing.T) {
	const count = 100_000
	w := newWorld(t)
	w.veth(1, state.PathBoth)
	scrape := func() uint64 {
		registry := prometheus.NewRegistry()
		w.check(registry.Register(NewCollector(w.scope.BPFFS, w.scope.StateDir)))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := registry.Gather()
		runtime.ReadMemStats(&after)
		w.check(err)
		return after.TotalAlloc - before.TotalAlloc
	}
	empty := scrape()
	d, err := datapath.Open(w.scope.BPFFS, datapath.Sizes{Backends: 1 << 18})
	w.check(err)
	defer d.Close()
	keys, values := make([]uint32, count), make([]datapath.Backend, count)
	for i := range keys {
		keys[i] = uint32(i + 1)
	}
	w.check(d.Backends.Put(keys, values))
	if full := scrape(); full > empty+2<<20 {
		t.Errorf("a scrape allocates %d bytes, and %d with %d backends", empty, full, count)
	}
}
