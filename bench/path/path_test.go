// SPDX-License-Identifier: Apache-2.0

package path

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf/rlimit"

	"github.com/mustang-net/mustang/bench/stats"
)

func flowFor(t *testing.T, from, to string) flow {
	t.Helper()
	return flow{netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)}
}

func TestFrameSaysWhereItGoes(t *testing.T) {
	for _, want := range []flow{
		flowFor(t, "10.1.0.2:40000", "10.96.0.1:5201"),
		flowFor(t, "[fd00::2]:40000", "[fd00:96::1]:5201"),
	} {
		f := frame{src: net.HardwareAddr{2, 0, 0, 0, 0, 1}, dst: net.HardwareAddr{2, 0, 0, 0, 0, 2}, flow: want, flags: tcpACK}
		b := f.bytes()
		if got := flowOf(b); got != want {
			t.Errorf("got %v, want %v", got, want)
		}
		if want.from.Addr().Is4() && onesSum(b[ethLen:ethLen+ipv4Len]) != 0xffff {
			t.Error("the IPv4 header's checksum is wrong")
		}
	}
}

func TestRestorerSendsTheSameFrameOrANewPort(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("loading programs needs root")
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	empty, err := newEmpty()
	if err != nil {
		t.Fatal(err)
	}
	defer empty.Close()
	for _, of := range []flow{flowFor(t, "10.1.0.2:40000", "10.96.0.1:5201"), flowFor(t, "[fd00::2]:40000", "[fd00:96::1]:5201")} {
		for _, newPort := range []bool{false, true} {
			r, err := newRestorer(frame{src: make(net.HardwareAddr, 6), dst: make(net.HardwareAddr, 6), flow: of, flags: tcpACK}, newPort)
			if err != nil {
				t.Fatal(err)
			}
			defer r.close()
			verdict, out, err := r.once(empty, 23456)
			if err != nil {
				t.Fatal(err)
			}
			want := of
			if newPort {
				want.from = netip.AddrPortFrom(of.from.Addr(), 23456)
			}
			if got := flowOf(out); verdict != tcNext || got != want {
				t.Errorf("verdict %d, %v; want %v", int32(verdict), got, want)
			}
			if _, err := r.time(empty, 100, 30000); err != nil {
				t.Error(err)
			}
		}
	}
}

// run is a document with one transaction of each cost.
func run(costs map[string]float64) *Document {
	d := &Document{Emulated: true, Unit: Instructions, Kernel: "6.12", Go: "go1"}
	for name, c := range costs {
		d.Transactions = append(d.Transactions, Transaction{Subject: name, Scenario: "rr", Cost: stats.Estimate{Median: c}})
	}
	return d
}

func TestRecordFailsOnWhatGrewOrWent(t *testing.T) {
	record, err := NewRecord(run(map[string]float64{"loopback": 10000, "veth": 20000}))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		now  map[string]float64
		want string // in the output; "" is no failure
	}{
		"the same":     {map[string]float64{"loopback": 10000, "veth": 20000}, ""},
		"within":       {map[string]float64{"loopback": 10000, "veth": 20399}, ""},
		"beyond":       {map[string]float64{"loopback": 10000, "veth": 20401}, "WORSE    rr veth: 20000 → 20401"},
		"gone":         {map[string]float64{"loopback": 10000}, "MISSING  rr veth"},
		"better":       {map[string]float64{"loopback": 10000, "veth": 10000}, ""},
		"one new more": {map[string]float64{"loopback": 10000, "veth": 20000, "netkit": 1}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			err := record.Check(run(c.now), &out)
			if (err != nil) != (c.want != "") || !strings.Contains(out.String(), c.want) {
				t.Errorf("%v, want %q in %q", err, c.want, out.String())
			}
		})
	}
	other := run(map[string]float64{"loopback": 10000, "veth": 20000})
	other.Kernel = "6.18"
	if err := record.Check(other, &bytes.Buffer{}); err == nil {
		t.Error("instructions of another kernel were compared")
	}
	other.Emulated = false
	if _, err := NewRecord(other); err == nil {
		t.Error("nanoseconds were recorded")
	}
}
