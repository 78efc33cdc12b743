// SPDX-License-Identifier: Apache-2.0

package path

import (
	"bytes"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
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
			if got := flowOf(out.frame); verdict != tcNext || got != want {
				t.Errorf("verdict %d, %v; want %v", int32(verdict), got, want)
			}
			if _, err := r.time(empty, 100, 30000); err != nil {
				t.Error(err)
			}
		}
	}
}

// ranOn is a document with one transaction of each cost, by contestant, and one
// packet at a hook of veth.
func ranOn(hook float64, costs map[string]float64) *Document {
	d := &Document{Emulated: true, Unit: Instructions, Kernel: "6.12", Go: "go1"}
	for name, c := range costs {
		d.Transactions = append(d.Transactions, Transaction{Subject: name + ", pod IP", Contestant: name, Via: "pod IP", Scenario: "rr", Cost: stats.Estimate{Median: c}})
	}
	if hook > 0 {
		d.Hooks = append(d.Hooks, Hook{Mode: "veth", Family: "v4", Hook: "from_pod", Packet: "established", Cost: stats.Estimate{Median: hook, Low: hook}})
	}
	return d
}

func TestARecordKeepsWhatWasNotRun(t *testing.T) {
	part := func(kernel, version string, parts ...string) *Record {
		r := &Record{Kernel: kernel, Go: version, Parts: map[string]figures{}}
		for _, p := range parts {
			r.Parts[p] = figures{kernel + version: 1}
		}
		return r
	}
	for name, c := range map[string]struct {
		old  *Record
		want string
	}{
		"comparable":     {part("6.12", "go1", "hooks of veth", "veth", "netkit"), "hooks of veth=6.12go1, netkit=6.12go1, veth=6.12go2"},
		"another Go":     {part("6.12", "go0", "hooks of veth", "netkit"), "hooks of veth=6.12go0, veth=6.12go2"},
		"another kernel": {part("6.1", "go2", "hooks of veth", "netkit"), "veth=6.12go2"},
	} {
		t.Run(name, func(t *testing.T) {
			now := part("6.12", "go2", "veth")
			if name == "comparable" {
				c.old.Go = now.Go
			}
			now.Keep(c.old)
			var got []string
			for _, p := range slices.Sorted(maps.Keys(now.Parts)) {
				for what := range now.Parts[p] {
					got = append(got, p+"="+what)
				}
			}
			if s := strings.Join(got, ", "); s != c.want {
				t.Errorf("%s, want %s", s, c.want)
			}
		})
	}
}

func TestRecordFailsOnWhatGrewOrWent(t *testing.T) {
	type costs = map[string]float64
	was := ranOn(300, costs{"loopback": 10000, "veth": 20000})
	was.Transactions = append(was.Transactions, Transaction{Subject: "veth, pod IP", Contestant: "veth", Via: "pod IP", Scenario: "crr", Cost: stats.Estimate{Median: 90000}})
	record, err := NewRecord(was)
	if err != nil {
		t.Fatal(err)
	}
	whole := func(hook, rr, crr float64) *Document {
		d := ranOn(hook, costs{"veth": rr})
		if crr > 0 {
			d.Transactions = append(d.Transactions, was.Transactions[2])
			d.Transactions[1].Cost.Median = crr
		}
		return d
	}
	otherGo := whole(310, 30000, 90000)
	otherGo.Go = "go2"
	for name, c := range map[string]struct {
		now  *Document
		want string // in the output; "" is no failure
	}{
		"the same":                 {whole(300, 20000, 90000), ""},
		"within":                   {whole(306, 20399, 90000), ""},
		"a transaction beyond":     {whole(300, 20401, 90000), "WORSE    veth: rr by pod IP: 20000 → 20401"},
		"a hook beyond":            {whole(307, 20000, 90000), "WORSE    hooks of veth: from_pod v4: established: 300 → 307"},
		"gone from a part":         {whole(300, 20000, 0), "MISSING  veth: crr by pod IP"},
		"better":                   {whole(100, 10000, 90000), ""},
		"a new part":               {ranOn(300, costs{"netkit": 1}), ""},
		"parts that were not run":  {ranOn(300, nil), ""},
		"nothing that is recorded": {ranOn(0, costs{"netkit": 1}), "-"},
		"another Go":               {otherGo, "WORSE    hooks of veth: from_pod v4: established: 300 → 310"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			err := record.Check(c.now, &out)
			if (err != nil) != (c.want != "") || c.want != "-" && !strings.Contains(out.String(), c.want) {
				t.Errorf("%v, want %q in %q", err, c.want, out.String())
			}
			if c.now == otherGo && strings.Contains(out.String(), "30000") {
				t.Errorf("transactions of another Go were compared: %s", out.String())
			}
		})
	}
	other := ranOn(300, costs{"veth": 20000})
	other.Kernel = "6.18"
	if err := record.Check(other, &bytes.Buffer{}); err == nil {
		t.Error("instructions of another kernel were compared")
	}
	other.Emulated, other.Kernel = false, record.Kernel
	if err := record.Check(other, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "nanoseconds") {
		t.Errorf("nanoseconds were compared with instructions: %v", err)
	}
	if _, err := NewRecord(other); err == nil {
		t.Error("nanoseconds were recorded")
	}
}
