// SPDX-License-Identifier: Apache-2.0

package samehost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mustang-net/mustang/bench/cpu"
	"github.com/mustang-net/mustang/bench/load"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/built"
	"go.uber.org/goleak"
)

// The load program must be a process of its own, so the test binary becomes it.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "bench-load" {
		if err := load.Main(os.Args[2:], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// short is a run of loopback alone: the A/A control and nothing else.
func short(t *testing.T) Options {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	o := Quick()
	o.Modes, o.Rounds, o.Duration, o.Turns = nil, 2, 60*time.Millisecond, 4
	o.Self = []string{os.Args[0], "bench-load"}
	return o
}

func testRun(t *testing.T, ctx context.Context, o Options) (*report.Document, error) {
	t.Helper()
	return testRunTo(t, ctx, o, &bytes.Buffer{})
}

// testRunTo waits for its turn: another package's test may be measuring.
func testRunTo(t *testing.T, ctx context.Context, o Options, log io.Writer) (*report.Document, error) {
	t.Helper()
	doc, err := Run(ctx, o, run.Log{W: log})
	for end := time.Now().Add(10 * time.Minute); err != nil && strings.Contains(err.Error(), "another bench runs") && time.Now().Before(end); {
		time.Sleep(time.Second)
		doc, err = Run(ctx, o, run.Log{W: log})
	}
	if left, _ := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/*/mustang-bench-%d", os.Getpid())); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	return doc, err
}

func TestLoopbackAgainstItself(t *testing.T) {
	o := short(t)
	o.UDP, o.TailRate = true, 2000
	doc, err := testRun(t, t.Context(), o)
	if err != nil {
		t.Fatal(err, doc.Failures)
	}
	// Two loopbacks with five scenarios, one with the stream alone.
	if want := o.Rounds * (2*5 + 1); len(doc.Samples) != want || !doc.Complete {
		t.Errorf("%d samples, want %d; complete: %v", len(doc.Samples), want, doc.Complete)
	}
	for _, s := range doc.Samples {
		if !s.Usable() || s.CPU <= 0 {
			t.Errorf("sample without rate or CPU time: %+v", s)
		}
	}
	// Each metric of the base must have its control.
	if want := 10; len(doc.Control) != want {
		t.Errorf("%d control figures, want %d", len(doc.Control), want)
	}
	var b bytes.Buffer
	doc.Render(&b, false)
	if !strings.Contains(b.String(), "loopback again") {
		t.Errorf("the report lacks its control:\n%s", b.String())
	}
}

func TestLoopbackOverIPv6AcrossCores(t *testing.T) {
	o := short(t)
	o.IPv6, o.Cores, o.Rounds = true, "both", 1
	if _, _, err := run.CPUs(true); err != nil {
		t.Skip(err)
	}
	doc, err := testRun(t, t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if want := 2 * (2*3 + 1); len(doc.Samples) != want {
		t.Errorf("%d samples, want %d", len(doc.Samples), want)
	}
}

func TestStreamByIperf3(t *testing.T) {
	o := short(t)
	if _, err := runner.Iperf3Version(); err != nil {
		t.Skip(err)
	}
	o.StreamBy, o.Rounds = StreamIperf3, 1
	doc, err := testRun(t, t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range doc.Samples {
		if s.Scenario == "stream" && (s.Bytes == 0 || s.CPU <= 0) {
			t.Errorf("iperf3 sample without bytes or CPU time: %+v", s)
		}
	}
}

func TestInterruptedRunKeepsFinishedRounds(t *testing.T) {
	o := short(t)
	o.Rounds = 1000
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	stop := errors.New("interrupted")
	log := &cancelAt{text: "round 3", cancel: func() { cancel(stop) }}
	doc, err := testRunTo(t, ctx, o, log)
	if !errors.Is(err, stop) {
		t.Fatalf("error %v, want the interruption", err)
	}
	if doc == nil || doc.Complete || len(doc.Samples) == 0 || doc.Samples[len(doc.Samples)-1].Round > 3 {
		t.Errorf("finished rounds are not kept, or the run is called complete")
	}
}

func TestResumedRunHasAllRounds(t *testing.T) {
	o := short(t)
	o.Rounds, o.TailRate = 1, 2000
	path := filepath.Join(t.TempDir(), "run.json")
	o.Keep = func(d *report.Document) error { return d.Write(path) }
	if _, err := testRun(t, t.Context(), o); err != nil {
		t.Fatal(err)
	}
	half, err := report.Read(path) // as a killed run leaves it
	if err != nil || half.FinishedRounds() != 1 {
		t.Fatalf("%v", err)
	}
	r := Resumed(half)
	r.Self, r.Rounds = o.Self, 3
	doc, err := testRun(t, t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if want := 3 * (2*4 + 1); len(doc.Samples) != want || !doc.Complete || doc.Settings.Rounds != 3 {
		t.Errorf("%d samples, want %d; complete: %v", len(doc.Samples), want, doc.Complete)
	}
	var b bytes.Buffer
	doc.Render(&b, false)
	if !strings.Contains(b.String(), "2000 requests/s") {
		t.Errorf("the report lacks the tails:\n%s", b.String())
	}
	for name, spoil := range map[string]func(*report.Document){
		"kernel":  func(d *report.Document) { d.Machine.Kernel = "6.1" },
		"CPU":     func(d *report.Document) { d.Machine.CPUs++ },
		"not in":  func(d *report.Document) { d.Subjects = d.Subjects[:1] },
		"was nft": func(d *report.Document) { d.Subjects[0].Backend = "nft" },
	} {
		other, err := report.Read(path)
		if err != nil {
			t.Fatal(err)
		}
		spoil(other)
		r := Resumed(other)
		r.Self, r.Rounds = o.Self, 2
		if _, err := testRun(t, t.Context(), r); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: resumed with %v", name, err)
		}
	}
}

// cancelAt cancels when a text is written.
type cancelAt struct {
	text   string
	cancel func()
}

func (c *cancelAt) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(c.text)) {
		c.cancel()
	}
	return len(p), nil
}

func TestWhatIsRunIsAnInput(t *testing.T) { built.Declare(t, "mustang") }

// TestPlainPodsAndIptables runs against labs of plain pods: a bridge without
// bridge-nf and Services, and a veth with iptables.
func TestPlainPodsAndIptables(t *testing.T) {
	o := short(t)
	var err error
	if o.Binary, err = built.Binary(t.TempDir(), "mustang", "MUSTANG_BIN"); err != nil {
		t.Fatal(err)
	}
	o.Modes, o.ServicesBy, o.Services = []string{report.Veth, report.BridgeNFOff}, []string{"iptables-nft"}, []int{3}
	o.Rounds, o.UDP = 1, true
	doc, err := testRun(t, t.Context(), o)
	if err != nil {
		t.Fatalf("%v: %v", err, doc)
	}
	for _, id := range []string{"veth iptables-nft (3 Services), pod IP", "veth iptables-nft (3 Services), ClusterIP, middle rule",
		"veth iptables-nft (3 Services), ClusterIP, last rule", "bridge-nf-off, pod IP"} {
		if !slices.ContainsFunc(doc.Samples, func(s runner.Sample) bool { return s.Subject == id && s.Usable() }) {
			t.Errorf("no usable sample of %q", id)
		}
	}
}

// Going on with it asks for a number, or another budget.
func TestBudgetIsNoNumberOfRounds(t *testing.T) {
	o := short(t)
	o.Rounds, o.Budget = 20, time.Millisecond
	doc, err := testRun(t, t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if doc.Settings.Rounds != 0 || Resumed(doc).Rounds != 0 {
		t.Errorf("a run by a budget was asked for %d rounds", doc.Settings.Rounds)
	}
}

// Pods are new in the rest of a run, and programs are loaded anew; they are the same programs.
func TestResumedRunKnowsMustangsPrograms(t *testing.T) {
	o := short(t)
	var err error
	if o.Binary, err = built.Binary(t.TempDir(), "mustang", "MUSTANG_BIN"); err != nil {
		t.Fatal(err)
	}
	o.Modes, o.ServicesBy, o.Rounds = []string{report.Veth}, []string{"mustang-tc"}, 1
	half, err := testRun(t, t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	r := Resumed(half)
	r.Self, r.Binary, r.Rounds = o.Self, o.Binary, 2
	if doc, err := testRun(t, t.Context(), r); err != nil || doc.FinishedRounds() != 2 {
		t.Fatal(err)
	}
}

func TestDeadDatapathIsAnError(t *testing.T) {
	o := short(t)
	env, err := loopback{name: "dead"}.Up(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer env.Close()
	target := env.Paths()[0].Target
	target.Dial = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), Port) // no route to it
	group := cpu.NewGroup(cpu.Name(), nil)
	defer group.Close()
	l := runner.Launcher{Self: o.Self, Group: group, Duration: o.Duration}
	if _, err := l.Open(t.Context(), target, "rr"); err == nil {
		t.Fatal("no error without a route")
	} else if !strings.Contains(err.Error(), "192.0.2.1") {
		t.Errorf("the error does not say where: %v", err)
	}
}

func TestServicesUnderTestStandInTheMiddleAndLast(t *testing.T) {
	backend := netip.MustParseAddr("10.1.0.3")
	for _, c := range []struct {
		by   lab.ServiceBy
		n    int
		udp  bool
		all  int
		want map[string]int // position: index
	}{
		{lab.IptablesNFT, 1, false, 1, map[string]int{"": 0}},
		{lab.IptablesNFT, 2, false, 2, map[string]int{report.Middle: 1}}, // which is the last
		{lab.IptablesLegacy, 1000, false, 1000, map[string]int{report.Middle: 500, report.Last: 999}},
		{lab.IptablesNFT, 10, true, 12, map[string]int{report.Middle: 5, report.Last: 10}}, // UDP stands beside TCP
		{lab.NFT, 1000, false, 1000, map[string]int{"": 500}},
		{lab.MustangTC, 10, true, 11, map[string]int{"": 5}},
	} {
		all, tested := pods{services: c.n, by: c.by, udp: c.udp}.serviceList(backend)
		got := map[string]int{}
		ports := map[uint16]bool{}
		for _, one := range tested {
			got[one.position] = slices.IndexFunc(all, func(s lab.Service) bool { return s.VIP == one.vip.Addr() && s.Backends[0] == one.backend })
			ports[one.backend.Port()] = true
		}
		if diff := cmp.Diff(c.want, got); diff != "" || len(all) != c.all || len(ports) != len(tested) {
			t.Errorf("%d Services by %s: %d in all, want %d; ports %v; under test (-want +got):\n%s", c.n, c.by, len(all), c.all, ports, diff)
		}
	}
}

func planned(t *testing.T, o Options) []Contestant {
	t.Helper()
	list, err := o.contestants()
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestContestantsOfAFullRun(t *testing.T) {
	o := Defaults()
	o.Services = []int{1, 5000}
	var names []string
	labs := map[string]bool{}
	for _, c := range planned(t, o) {
		names = append(names, c.Name())
		if extra, ok := c.(run.Optional); ok {
			c = extra.Contestant
		}
		if p, ok := c.(pods); ok {
			if len(p.labName) > 6 || labs[p.labName] {
				t.Errorf("lab name %q is too long or taken", p.labName)
			}
			labs[p.labName] = true
		}
	}
	// Loopbacks; three modes by five kinds by two numbers; bridge-nf-off alone.
	if want := 3 + 3*5*2 + 1; len(names) != want {
		t.Errorf("%d contestants, want %d: %v", len(names), want, names)
	}
	slices.Sort(names)
	if len(slices.Compact(names)) != len(labs)+3 {
		t.Errorf("names are not unique: %v", names)
	}
}

func TestTunedContestants(t *testing.T) {
	o := Defaults()
	o.Modes, o.ServicesBy = []string{"veth", "macvlan"}, []string{"nft", "mustang-socket"}
	o.Tune = []string{"local-mtu", "big-tcp", "local-mtu+big-tcp"}
	sizes := map[string]string{}
	for _, c := range planned(t, o)[3:] {
		cfg := c.(pods).config("")
		sizes[c.Name()] = fmt.Sprint(cfg.LocalMTU, cfg.BigTCP)
	}
	want := map[string]string{
		"veth nft": "off0", "veth mustang-socket": "off0", "veth mustang-socket +local-mtu": "auto0",
		"veth mustang-socket +big-tcp": "off524280", "veth mustang-socket +local-mtu +big-tcp": "auto524280",
		"macvlan nft": "off0", "macvlan mustang-socket": "off0", "macvlan mustang-socket +big-tcp": "off524280",
	}
	if diff := cmp.Diff(want, sizes); diff != "" {
		t.Errorf("local MTU and BIG TCP (-want +got):\n%s", diff)
	}
}

func TestOptionsAreValidated(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"mode": func(o *Options) { o.Modes = []string{"carrier-pigeon"} }, "by": func(o *Options) { o.ServicesBy = []string{"smoke-signals"} },
		"services": func(o *Options) { o.Services = []int{0} }, "rounds": func(o *Options) { o.Rounds = 0 },
		"budget": func(o *Options) { o.Budget = -1 }, "tails": func(o *Options) { o.TailRate = -1 },
		"cores": func(o *Options) { o.Cores = "all" }, "stream": func(o *Options) { o.StreamBy = "netperf" },
		"duration": func(o *Options) { o.Duration = time.Millisecond }, "none": func(o *Options) { o.Services = nil },
		"turns": func(o *Options) { o.Turns = 0 }, "short turns": func(o *Options) { o.Turns = 100 },
		"tune": func(o *Options) { o.Tune = []string{"local-mtu+wings"} }, "same mode": func(o *Options) { o.Modes = []string{"veth", "veth"} },
		"same number": func(o *Options) { o.Services = []int{1, 1} },
	} {
		o := Defaults()
		change(&o)
		if o.validate() == nil {
			t.Errorf("%s: nonsense was accepted", name)
		}
	}
	if err := Defaults().validate(); err != nil {
		t.Error(err)
	}
	if err := Quick().validate(); err != nil {
		t.Error(err)
	}
}
