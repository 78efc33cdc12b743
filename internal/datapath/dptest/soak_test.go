// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package dptest -no-global-types -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" soak soak/soak.bpf.c

const (
	soakServices = 160
	soakSteps    = 6
	soakQuick    = 200_000 // flows; MUSTANG_TEST_FLOWS=10000000 is the whole
	soakChunk    = 300_000 // packets between two looks at the clock
)

// Millions of flows, a quarter each that closes, is never answered, falls silent
// and is reset, through tables of the size that nodes have, with time-outs of
// seconds: none is refused, every packet arrives, and when their time is over
// nothing of them is left that a later flow could meet.
func TestFlowsLeaveNothingBehind(t *testing.T) {
	flows := uint64(soakQuick)
	if text := os.Getenv("MUSTANG_TEST_FLOWS"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		check(t, err)
		flows = n
	}
	for family, v6 := range map[string]bool{"ipv4": false, "ipv6": true} {
		t.Run(family, func(t *testing.T) { soakWith(t, flows/2, v6) })
	}
}

func soakWith(t *testing.T, flows uint64, v6 bool) {
	n := NewNetwork(t, Options{
		Timeouts: &bpfgen.PodCtTimeouts{TcpHalfOpen: 2, TcpEstablished: 3, TcpClosing: 2, TcpReset: 1, UdpHalfOpen: 2, UdpEstablished: 3, Other: 1},
		Sizes:    map[string]uint32{"mst_ct_v1": 131072, "mst_ct_new_v1": 16384},
	}, 3)
	client, server := n.Pods[1], n.Pods[2]
	for i := range soakServices {
		n.SetService(t, oracle.TCP, netip.AddrPortFrom(VIP(1+i, v6), 80), netip.AddrPortFrom(server.IP(v6), uint16(8000+i)))
	}
	check(t, n.MstProgramsV1.Put(uint32(bpfgen.ProgFromPodHost), n.PodPrograms.FromPod))
	driver := loadSoak_(t, n, client, server, v6)
	run := func(packets uint64) {
		frame := make([]byte, 74)
		for done := uint64(0); done < packets; {
			chunk := min(packets-done, soakChunk)
			_, err := driver.soak.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(chunk)})
			check(t, err)
			done += chunk
		}
	}
	start := time.Now()
	run(flows * soakSteps)
	t.Logf("%d flows in %s", flows, time.Since(start).Round(time.Millisecond))
	sent := driver.sent(t)
	to, from := n.Counters(t, server).ToPod.Packets, n.Counters(t, client).ToPod.Packets
	if sent[0] != to || sent[1] != from || sent[0] < flows {
		t.Errorf("the client sent %d packets, of which %d arrived; the server %d, of which %d did", sent[0], to, sent[1], from)
	}
	for reason := range uint32(len(bpfgen.Reasons)) {
		if drops := n.Drops(t, reason, bpfgen.DirFromPod); drops > 0 {
			t.Errorf("%d packets were dropped: %s", drops, ReasonName(reason))
		}
	}
	halvesAgree(t, n)
	waitFor(t, "all flows expire", func() bool { return living(t, n) == 0 })
	// The same tuples begin anew, and nothing leads them to where they were.
	other := n.Pods[3]
	for i := range soakServices {
		n.SetService(t, oracle.TCP, netip.AddrPortFrom(VIP(1+i, v6), 80), netip.AddrPortFrom(other.IP(v6), uint16(8000+i)))
	}
	driver.rewind(t)
	before := n.Counters(t, server).ToPod.Packets
	run(20_000 * soakSteps)
	if after := n.Counters(t, server).ToPod.Packets; after != before {
		t.Errorf("%d packets of new flows went to the backend of old ones", after-before)
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not so: %s", what)
		}
	}
}

// living is how many entries a packet would find.
func living(t *testing.T, n *Network) (alive int) {
	t.Helper()
	now := soakClock(t)
	for _, f := range allFlows(t, n) {
		if int32(f.Entry.Expires-now) >= 0 {
			alive++
		}
	}
	return alive
}

// halvesAgree fails when a living half refers to another flow's. One whose other
// half is gone is brought back by its next packet, or ended by it when both ends have closed.
func halvesAgree(t *testing.T, n *Network) {
	t.Helper()
	now := soakClock(t)
	by := map[Tuple]Flow{}
	all := allFlows(t, n)
	for _, f := range all {
		if int32(f.Entry.Expires-now) >= 0 {
			by[f.Tuple()] = f
		}
	}
	wrong := 0
	for mine, f := range by {
		if f.Entry.ClosingOrig != 0 && f.Entry.ClosingReply != 0 {
			continue
		}
		o := f.Entry.Other
		other := Tuple{f.Key.Proto, addrPort(o.Src, o.Sport), addrPort(o.Dst, o.Dport)}
		half, ok := by[other]
		if !ok {
			continue
		}
		b := half.Entry.Other
		if back := (Tuple{f.Key.Proto, addrPort(b.Src, b.Sport), addrPort(b.Dst, b.Dport)}); back != mine || half.Entry.Role == f.Entry.Role {
			wrong++
		}
	}
	if wrong > 0 || len(by) == 0 {
		t.Errorf("of %d living halves %d refer to another flow's", len(by), wrong)
	}
}

func soakClock(t *testing.T) uint32 {
	t.Helper()
	var now unix.Timespec
	check(t, unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now))
	return uint32(now.Nano() >> bpfgen.SecondShift)
}

func allFlows(t *testing.T, n *Network) (out []Flow) {
	t.Helper()
	out = n.nearFlows(t)
	for big, m := range n.flowTables() {
		keys := make([]bpfgen.PodCtKey, m.MaxEntries())
		values := make([]bpfgen.PodCtEntry, m.MaxEntries())
		var cursor ebpf.MapBatchCursor
		for {
			k, err := m.BatchLookup(&cursor, keys, values, nil)
			for i := range k {
				out = append(out, Flow{keys[i], values[i], values[i].Opening == bpfgen.CTAnswered, big, false})
			}
			if err != nil {
				break // the end
			}
		}
	}
	return out
}

type soakDriver struct {
	soak      *ebpf.Program
	variables soakVariables
}

func loadSoak_(t *testing.T, n *Network, client, server Pod, v6 bool) soakDriver {
	t.Helper()
	spec, err := loadSoak()
	check(t, err)
	for name, value := range map[string]any{
		"client": soakEnd(client), "server": soakEnd(server), "vip4": toAddr(VIP(1, false)), "vip6": toAddr(VIP(1, true)),
		"services": uint32(soakServices), "ipv6": map[bool]uint8{true: 1}[v6],
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			t.Fatal(fmt.Errorf("set %s: %w", name, err))
		}
	}
	spec.Maps["mst_programs_v1"].MaxEntries = n.MstProgramsV1.MaxEntries()
	var objects struct {
		soakPrograms
		soakVariables
	}
	check(t, spec.LoadAndAssign(&objects, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{"mst_programs_v1": n.MstProgramsV1}}))
	t.Cleanup(func() { objects.soakPrograms.Close() })
	return soakDriver{objects.Soak, objects.soakVariables}
}

func soakEnd(p Pod) soakPod {
	return soakPod{Ip4: toAddr(p.IP4), Ip6: toAddr(p.IP6), Mac: p.MAC, NodeMac: p.NodeMAC, Id: p.ID}
}

// soakPod is struct end.
type soakPod struct {
	Ip4, Ip6     bpfgen.PodAddr
	Mac, NodeMac [6]uint8
	Id           uint32
}

func (d soakDriver) sent(t *testing.T) (sent [2]uint64) {
	t.Helper()
	check(t, d.variables.Sent.Get(&sent))
	return sent
}

func (d soakDriver) rewind(t *testing.T) {
	t.Helper()
	check(t, d.variables.Next.Set(uint64(0)))
}
