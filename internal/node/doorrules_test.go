// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// These tests have a node with two addresses of each family, in a namespace of
// their own. No kernel needs SCTP for it to be routed.

var (
	own4, other4 = netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.2")
	own6, other6 = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	theirs       = []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd96::1")}
)

type doorNode struct {
	t    *testing.T
	door *Door
}

func newDoorNode(t *testing.T) *doorNode {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread() // the thread dies with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	n := &doorNode{t: t}
	n.run("sysctl -qw net.ipv4.conf.all.forwarding=1 net.ipv6.conf.all.forwarding=1") // lookups as of what comes in answer then
	n.run("ip link set lo up && ip link add nic type veth peer name wire && ip link set wire up && ip link set nic up")
	for _, a := range []string{"198.51.100.1/32", "198.51.100.2/32", "2001:db8::1/128", "2001:db8::2/128"} {
		n.run("ip addr add %s dev nic%s", a, map[bool]string{true: " nodad"}[strings.Contains(a, ":")])
	}
	n.makeDoor()
	for _, a := range []netip.Addr{own6, other6} {
		for end := time.Now().Add(10 * time.Second); n.way(unix.IPPROTO_TCP, a, 80) != ""; { // the kernel takes its time
			if time.Now().After(end) {
				t.Fatalf("%v is not the node's own", a)
			}
		}
	}
	return n
}

func (n *doorNode) makeDoor() {
	var err error
	if n.door, err = EnsureDoor(true); err != nil {
		n.t.Fatal(err)
	}
}

func (n *doorNode) run(format string, args ...any) string {
	n.t.Helper()
	line := fmt.Sprintf(format, args...)
	out, err := exec.Command("sh", "-c", line).CombinedOutput()
	if err != nil {
		n.t.Fatalf("%s: %v: %s", line, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (n *doorNode) rules() string { n.t.Helper(); return n.run("ip -d rule; ip -d -6 rule") }

func (n *doorNode) lead(own ...DoorPorts) {
	n.t.Helper()
	if err := n.door.Lead(theirs, own, nil); err != nil {
		n.t.Error(err)
	}
}

// way is the interface by which the kernel sends what a socket of the node sends;
// "": to the node itself.
func (n *doorNode) way(proto uint8, to netip.Addr, port uint16) string {
	n.t.Helper()
	question := make([]byte, 64) // struct bpf_fib_lookup
	question[0], question[1], question[4], question[5], question[8] = unix.AF_INET, proto, byte(port>>8), byte(port), 1
	copy(question[32:], to.AsSlice())
	if to.Is6() {
		question[0] = unix.AF_INET6
	}
	insns := asm.Instructions{}
	for i := 0; i < len(question); i += 4 {
		word := int64(int32(nl.NativeEndian().Uint32(question[i:])))
		insns = append(insns, asm.StoreImm(asm.RFP, int16(i-len(question)), word, asm.Word))
	}
	insns = append(insns,
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, int32(-len(question))), asm.Mov.Imm(asm.R3, int32(len(question))), asm.Mov.Imm(asm.R4, 0),
		asm.FnFibLookup.Call(),
		asm.LSh.Imm(asm.R0, 16), asm.LoadMem(asm.R1, asm.RFP, int16(8-len(question)), asm.Word), asm.Or.Reg(asm.R0, asm.R1), asm.Return())
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: insns})
	if err != nil {
		n.t.Fatal(err)
	}
	defer p.Close()
	answer, _, err := p.Test(make([]byte, 64))
	if err != nil {
		n.t.Fatal(err)
	}
	switch code := answer >> 16; code {
	case 0, 7: // found; found, without a neighbour
		l, err := net.InterfaceByIndex(int(answer & 0xffff))
		if err != nil {
			n.t.Fatal(err)
		}
		return l.Name
	case 4: // not to be forwarded: it is the node's
		return ""
	default:
		n.t.Fatalf("the way to %v by protocol %d: the kernel answers %d", netip.AddrPortFrom(to, port), proto, code)
		return ""
	}
}

// leads fails unless exactly these go into the door, of all that is around them.
func (n *doorNode) leads(what string, want ...DoorPorts) {
	n.t.Helper()
	for _, a := range []netip.Addr{own4, other4, own6, other6} {
		for _, port := range []uint16{80, 30079, 30080, 30081, 30082, 60999, 61000, 65534} {
			for _, proto := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
				in := proto == unix.IPPROTO_SCTP && slices.ContainsFunc(want, func(p DoorPorts) bool { return p.Addr == a && p.First <= port && port <= p.Last })
				if way := n.way(proto, a, port); way != map[bool]string{true: DoorName}[in] {
					n.t.Errorf("%s: %v by protocol %d goes to %q", what, netip.AddrPortFrom(a, port), proto, way)
				}
			}
		}
	}
}

// localRules fails unless there is as much of table local's rule as should be.
func (n *doorNode) localRules(what string, least, most int) {
	n.t.Helper()
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, err := firstRules(family)
		if err != nil {
			n.t.Fatal(err)
		}
		if have := len(slices.DeleteFunc(list, func(s standing) bool { return !s.local() })); have < least || have > most {
			n.t.Errorf("%s: table local's rule stands there %d times:\n%s", what, have, n.rules())
		}
	}
}

func port(a netip.Addr, p uint16) DoorPorts { return DoorPorts{a, p, p} }

var (
	few  = []DoorPorts{port(own4, 30080), port(own6, 30080)}
	many = []DoorPorts{{own4, 30080, 30081}, port(other4, 80), {other4, 61000, 65535}, port(own6, 80), port(own6, 30080), port(other6, 30082)}
)

func TestTheDoorStandsBeforeTableLocal(t *testing.T) {
	n := newDoorNode(t)
	n.run("ip rule add pref 5 to 203.0.113.0/24 lookup 99 && ip rule add pref 1000 iif nic lookup 98 && ip -6 rule add pref 7 fwmark 3 lookup 97")
	before := n.rules()
	n.leads("before")
	for _, own := range [][]DoorPorts{few, many, few, nil, many} {
		n.lead(own...)
		n.leads(fmt.Sprint(own), own...)
		n.localRules(fmt.Sprint(own), 1, 1)
		if way := n.way(unix.IPPROTO_SCTP, theirs[0], 80); way != DoorName {
			t.Errorf("%v goes to %q", theirs[0], way)
		}
		now := n.rules()
		for _, line := range strings.Split(before, "\n") {
			if !strings.Contains(now, line) {
				t.Errorf("a rule of others, %q, is gone:\n%s", line, now)
			}
		}
		n.lead(own...)
		if again := n.rules(); again != now {
			t.Errorf("done again, the rules are\n%s\nbefore:\n%s", again, now)
		}
	}
	n.run("ip link del %s", DoorName) // the rules go without it, too
	if err := RemoveDoor(); err != nil {
		t.Error(err)
	}
	if after := n.rules(); after != before {
		t.Errorf("without the door:\n%s\nbefore it:\n%s", after, before)
	}
}

// A tool that is killed at any step leaves table local in force, and to the next
// tool no more than to finish, or to take everything away.
func TestRulesOfTheDoorSurviveAKillAtEachStep(t *testing.T) {
	n := newDoorNode(t)
	pristine := n.rules()
	real := changeRule
	t.Cleanup(func() { changeRule = real })
	killed := errors.New("killed")
	for _, c := range []struct{ from, to []DoorPorts }{{nil, many}, {few, many}, {many, few}, {many, nil}} {
		n.lead(c.to...)
		want := n.rules()
		for _, next := range []string{"finishes", "removes"} {
			for step := 0; ; step++ {
				n.makeDoor()
				n.lead(c.from...)
				done := 0
				changeRule = func(kind, flags int, header nl.RtMsg, attrs []attr) error {
					if done == step {
						return killed
					}
					err := real(kind, flags, header, attrs)
					if err == nil {
						done++
					}
					return err
				}
				err := n.door.Lead(theirs, c.to, nil)
				changeRule = real
				if err == nil {
					if step < 3 {
						t.Errorf("%v to %v took %d steps", c.from, c.to, step)
					}
					break
				}
				if !errors.Is(err, killed) {
					t.Fatal(err)
				}
				what := fmt.Sprintf("%v to %v, killed after %d steps", c.from, c.to, step)
				n.localRules(what, 1, 2)
				if way := n.way(unix.IPPROTO_TCP, own4, 30080) + n.way(unix.IPPROTO_UDP, other6, 80); way != "" {
					t.Errorf("%s: TCP or UDP to the node goes to %q", what, way)
				}
				if next == "removes" {
					if err := RemoveDoor(); err != nil {
						t.Error(err)
					}
					if now := n.rules(); now != pristine {
						t.Errorf("%s, then removed:\n%s\nwant\n%s", what, now, pristine)
					}
					continue
				}
				n.lead(c.to...)
				n.leads(what, c.to...)
				n.localRules(what, 1, 1)
				if now := n.rules(); !sameLines(now, want) {
					t.Errorf("%s, then finished:\n%s\nwant\n%s", what, now, want)
				}
			}
		}
	}
}

func sameLines(a, b string) bool {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	slices.Sort(x)
	slices.Sort(y)
	return slices.Equal(x, y)
}

// While rules come and go, whoever connects to the node by TCP and UDP, by the very
// ports, does as if there were none.
func TestTableLocalIsInForceThroughout(t *testing.T) {
	n := newDoorNode(t)
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	stop, ended := make(chan struct{}), make(chan error)
	rounds := 0
	go func() {
		ended <- netns.DoFile(ns, func() error {
			for _, a := range []netip.Addr{own4, own6} {
				l, err := net.Listen("tcp", netip.AddrPortFrom(a, 30080).String())
				if err != nil {
					return err
				}
				defer l.Close()
				go func() {
					for c, err := l.Accept(); err == nil; c, err = l.Accept() {
						c.Close()
					}
				}()
			}
			for ; ; rounds++ {
				select {
				case <-stop:
					return nil
				default:
				}
				for _, a := range []netip.Addr{own4, own6} {
					for _, network := range []string{"tcp", "udp"} {
						c, err := net.DialTimeout(network, netip.AddrPortFrom(a, 30080).String(), time.Second)
						if err != nil {
							return err
						}
						if from := c.LocalAddr().String(); !strings.Contains(from, a.String()) {
							return fmt.Errorf("%s to %v is from %s", network, a, from)
						}
						c.Close()
					}
				}
			}
		})
	}()
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		n.lead(many...)
		n.lead(few...)
		n.lead()
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if rounds < 20 {
		t.Errorf("only %d rounds of connections met the changes", rounds)
	}
}

// Others move table local's rule as well, and then it is theirs.
func TestTableLocalMovedByOthers(t *testing.T) {
	n := newDoorNode(t)
	move := func() {
		for _, family := range []string{"-4", "-6"} {
			n.run("ip %s rule add pref 100 lookup local && ip %s rule del pref 0 lookup local", family, family)
		}
	}
	n.lead(few...)
	move()
	n.leads("moved with the door there", few...)
	n.lead(many...)
	n.leads("more, after it was moved", many...)
	n.localRules("moved", 0, 0)
	n.lead()
	moved := n.rules()
	n.lead(many...)
	n.leads("from the start", many...)
	for _, family := range []string{"-4", "-6"} {
		n.run("ip %s rule add pref 0 lookup local && ip %s rule del pref 100", family, family)
	}
	n.leads("moved back", many...)
	n.localRules("moved back", 1, 1)
	move()
	n.lead()
	if now := n.rules(); now != moved {
		t.Errorf("%s\nbefore:\n%s", now, moved)
	}
}

// A rule of others at the same preference is not moved past table local's, nor
// taken for it.
func TestOthersRulesOfPreferenceZeroStay(t *testing.T) {
	for _, rule := range []string{"to 203.0.113.0/24 lookup 99", "iif nic lookup local", "not iif nic lookup local"} {
		t.Run(rule, func(t *testing.T) {
			n := newDoorNode(t)
			n.lead()
			n.run("ip rule add pref 0 %s", rule)
			before := n.rules()
			err := n.door.Lead(theirs, []DoorPorts{port(own4, 30080)}, nil)
			if err == nil || !strings.Contains(err.Error(), "preference 0") || !strings.Contains(err.Error(), "198.51.100.1:30080") {
				t.Errorf("error: %v", err)
			}
			if now := n.rules(); now != before {
				t.Errorf("%s\nbefore:\n%s", now, before)
			}
			n.run("ip rule del pref 0 %s", rule)
			n.lead(few...)
			n.leads("without it", few...)
			n.run("ip rule add pref 0 %s", rule) // behind
			n.lead(few...)
			n.leads("behind", few...)
			if err := RemoveDoor(); err != nil {
				t.Error(err)
			}
			n.localRules("removed", 1, 1)
			if now := n.rules(); !strings.Contains(now, strings.Fields(rule)[1]) {
				t.Errorf("the rule is gone:\n%s", now)
			}
		})
	}
}

// The kernel takes no rule for the last port of all.
func TestTheLastPortHasNoWayIntoTheDoor(t *testing.T) {
	n := newDoorNode(t)
	if err := n.door.Lead(theirs, []DoorPorts{port(own4, 30080), port(own6, 65535)}, nil); err == nil || !strings.Contains(err.Error(), "[2001:db8::1]:65535") {
		t.Errorf("error: %v", err)
	}
	n.leads("beside it", port(own4, 30080))
}

func TestMergeDoorPorts(t *testing.T) {
	got := MergeDoorPorts([]DoorPorts{port(own4, 30081), port(other4, 30080), port(own4, 30080), {own4, 61000, 65535}, port(own4, 65000), port(own4, 30083), port(own4, 65535)})
	want := []DoorPorts{{own4, 30080, 30081}, port(own4, 30083), {own4, 61000, 65535}, port(other4, 30080)}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
