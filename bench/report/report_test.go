// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/bench/stats"
)

// sampleDocument has loopback, plain veth and mustang on veth with exact
// ratios; the machine's speed changes each round.
func sampleDocument(rounds int) *Document {
	d := &Document{Schema: Schema, Complete: true,
		Settings: Settings{Rounds: rounds, Duration: 1, Cores: []string{"same"}, Seed: 1, StreamBy: "iperf3"},
		Subjects: []Subject{
			{ID: Base, Contestant: Base, Via: Loopback},
			{ID: BaseAgain, Contestant: BaseAgain, Via: Loopback},
			{ID: BaseMTU, Contestant: BaseMTU, Via: Loopback},
			{ID: "veth iptables-nft, pod IP", Contestant: "veth iptables-nft", Mode: Veth, By: "iptables-nft", Services: 1, Via: PodIP, Backend: "iptables v1.8.9 (nf_tables)"},
			{ID: "veth iptables-nft, ClusterIP", Contestant: "veth iptables-nft", Mode: Veth, By: "iptables-nft", Services: 1, Via: ClusterIP},
			{ID: "veth mustang-tc, pod IP", Contestant: "veth mustang-tc", Mode: Veth, By: "mustang-tc", Services: 1, Via: PodIP, ProgramSet: json.RawMessage(`["policy"]`)},
			{ID: "veth mustang-tc, ClusterIP", Contestant: "veth mustang-tc", Mode: Veth, By: "mustang-tc", Services: 1, Via: ClusterIP},
			{ID: "veth mustang-tc +local-mtu, pod IP", Contestant: "veth mustang-tc +local-mtu", Mode: Veth, By: "mustang-tc", Services: 1, Tune: LocalMTU, Via: PodIP},
			{ID: "veth mustang-tc +big-tcp, pod IP", Contestant: "veth mustang-tc +big-tcp", Mode: Veth, By: "mustang-tc", Services: 1, Tune: BigTCP, Via: PodIP},
		}}
	speed := map[string]float64{Base: 1, BaseAgain: 1, BaseMTU: 1, "veth iptables-nft, pod IP": 0.8, "veth iptables-nft, ClusterIP": 0.6,
		"veth mustang-tc, pod IP": 0.92, "veth mustang-tc, ClusterIP": 0.874,
		"veth mustang-tc +local-mtu, pod IP": 0.98, "veth mustang-tc +big-tcp, pod IP": 1.25}
	for round := 1; round <= rounds; round++ {
		for _, s := range d.Subjects {
			for _, scenario := range []string{"stream", "rr", "crr"} {
				rate := 1000 * speed[s.ID] * float64(round)
				d.Samples = append(d.Samples, runner.Sample{Case: runner.Case{Subject: s.ID, Scenario: scenario, Cores: "same"},
					Round: round, Rate: rate, Count: int64(rate * 1e6), Bytes: int64(rate * 1e9), Seconds: 1, CPU: 1})
			}
		}
	}
	return d
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

func TestFiguresAreRatiosInsideRounds(t *testing.T) {
	d := sampleDocument(15)
	f := NewFigures(d)
	got := f.Ratio("veth mustang-tc, ClusterIP", "veth mustang-tc, pod IP", RRRate, "same").Ratio
	if !near(got.Median, 0.95) || !near(got.Low, 0.95) || got.N != 15 {
		t.Errorf("ClusterIP ÷ pod IP = %+v, want exactly 0.95 over 15 rounds", got)
	}
	cpu := f.Ratio("veth iptables-nft, pod IP", Base, CPUPerGB, "same").Ratio
	if !near(cpu.Median, 1/0.8) {
		t.Errorf("CPU per GB = %v, want %v", cpu.Median, 1/0.8)
	}
	if none := f.Ratio("nobody", Base, RRRate, "same").Ratio; none.N != 0 {
		t.Errorf("a subject without samples has a figure: %+v", none)
	}
}

func TestWhatWasNotMeasuredIsNoColumn(t *testing.T) {
	for _, cpu := range []float64{0, 1} {
		d := sampleDocument(15)
		for i := range d.Samples {
			d.Samples[i].CPU = cpu
		}
		var b bytes.Buffer
		d.Render(&b, false)
		if got := strings.Contains(b.String(), "CPU s/GB"); got != (cpu > 0) || !strings.Contains(b.String(), "CRR") {
			t.Errorf("CPU time %v: a column of it is there: %v", cpu, got)
		}
	}
}

func TestFailedSamplesLeaveTheirRoundOut(t *testing.T) {
	d := sampleDocument(15)
	d.Samples[0].Error, d.Samples[0].Rate = "dead", 0 // loopback, stream, round 1
	if got := NewFigures(d).Ratio(BaseAgain, Base, StreamRate, "same").Ratio; got.N != 14 {
		t.Errorf("rests on %d rounds, want 14", got.N)
	}
}

func TestRatioOfTurnsBearsAStolenTurnAndSaysWhenTurnsAreUneven(t *testing.T) {
	d := sampleDocument(15)
	for i := range d.Samples {
		s := &d.Samples[i]
		for turn := range 10 {
			speed := 1 + float64((turn*7+s.Round)%10)/10 // of the machine in this cycle, the same for all
			s.TurnRates = append(s.TurnRates, speed*s.Rate)
			s.TurnCosts = append(s.TurnCosts, 1/s.Rate)
		}
		if s.Subject == "veth mustang-tc, pod IP" && s.Scenario == "rr" {
			s.TurnRates[4] /= 10
			s.Rate *= 0.91
		}
	}
	f := NewFigures(d)
	if got := f.Ratio("veth mustang-tc, pod IP", Base, RRRate, "same").Ratio.Median; !near(got, 0.92) {
		t.Errorf("ratio %v, want 0.92: one turn of ten was stolen in each round", got)
	}
	d.Compute()
	var b bytes.Buffer
	d.Render(&b, false)
	if want := "UNEVEN: veth mustang-tc, pod IP, RR, same core"; strings.Count(b.String(), "UNEVEN") != 1 || !strings.Contains(b.String(), want) {
		t.Errorf("the report must say that a turn in ten was slow, and nothing else is uneven:\n%s", b.String())
	}
}

func TestBars(t *testing.T) {
	for _, c := range []struct {
		rounds int
		name   string
		want   stats.Verdict
	}{
		{15, "veth RR ÷ loopback", stats.Pass},
		{15, "veth stream ÷ loopback at the same MTU", stats.Pass},
		{15, "veth stream with local MTU ÷ loopback", stats.Fail},
		{15, "veth stream with BIG TCP ÷ loopback", stats.Pass},
		{15, "bridge stream with BIG TCP ÷ loopback", stats.NotShown},
		{15, "veth CPU per GB ÷ loopback", stats.Pass},
		{15, "macvlan RR ÷ loopback", stats.NotShown},
		{15, "veth CRR by ClusterIP ÷ iptables-nft, Services: 1", stats.Pass},
		{15, "veth CRR by ClusterIP ÷ iptables-nft, Services: 5000, last rule", stats.NotShown},
		{5, "veth RR ÷ loopback", stats.NotShown},
	} {
		d := sampleDocument(c.rounds)
		d.Compute()
		found := false
		for _, b := range d.Bars {
			if b.Name == c.name {
				found = true
				if b.Verdict != c.want {
					t.Errorf("%s after %d rounds: %s (%s), want %s", c.name, c.rounds, b.Verdict, b.Why, c.want)
				}
				if b.Verdict == stats.NotShown && b.Why == "" {
					t.Errorf("%s is not shown and does not say why", c.name)
				}
			}
		}
		if !found {
			t.Errorf("no bar is called %q", c.name)
		}
	}
}

// Beside the real kube-proxy each way that mustang serves has a verdict of its own.
func TestBarsOverTheRealKubeProxy(t *testing.T) {
	d := &Document{Schema: Schema, Complete: true, Settings: Settings{Rounds: 15, Duration: 1, Cores: []string{"same"}, Seed: 1}}
	add := func(by, position string, services int, rate float64) {
		s := Subject{ID: fmt.Sprintf("%s %d %s", by, services, position), Mode: Veth, By: by, Position: position, Services: services, Via: ClusterIP}
		d.Subjects = append(d.Subjects, s)
		for round := 1; round <= 15; round++ {
			d.Samples = append(d.Samples, runner.Sample{Case: runner.Case{Subject: s.ID, Scenario: "crr", Cores: "same"},
				Round: round, Rate: rate * float64(round), Seconds: 1, CPU: 1})
		}
	}
	for _, n := range []int{1, 1000, 5000} {
		add("mustang-tc", "", n, 1000)
		add("mustang-socket", "", n, 1300)
	}
	add("kube-proxy-iptables", "", 1, 780)
	add("kube-proxy-iptables", Middle, 5000, 500)
	add("kube-proxy-iptables", Last, 5000, 400)
	add("kube-proxy-iptables", Middle, 1000, 700) // there is no bar for it
	add("kube-proxy-nftables", "", 1000, 900)
	f := NewFigures(d)
	got := map[string]stats.Verdict{}
	for _, b := range evaluate(d, f) {
		if strings.Contains(b.Name, "kube-proxy") {
			got[b.Name] = b.Verdict
		}
	}
	want := map[string]stats.Verdict{
		"veth mustang-tc CRR by ClusterIP ÷ kube-proxy-iptables, Services: 1":                     stats.Pass,
		"veth mustang-socket CRR by ClusterIP ÷ kube-proxy-iptables, Services: 1":                 stats.Pass,
		"veth mustang-tc CRR by ClusterIP ÷ kube-proxy-iptables, Services: 5000, middle rule":     stats.Fail,
		"veth mustang-socket CRR by ClusterIP ÷ kube-proxy-iptables, Services: 5000, middle rule": stats.Pass,
		"veth mustang-tc CRR by ClusterIP ÷ kube-proxy-iptables, Services: 5000, last rule":       stats.Pass,
		"veth mustang-socket CRR by ClusterIP ÷ kube-proxy-iptables, Services: 5000, last rule":   stats.Pass,
		"veth mustang-tc CRR by ClusterIP ÷ kube-proxy-nftables, Services: 1000":                  stats.Fail,
		"veth mustang-socket CRR by ClusterIP ÷ kube-proxy-nftables, Services: 1000":              stats.Pass,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("verdicts differ:\n%s", diff)
	}
}

func TestDocumentSurvivesItsFile(t *testing.T) {
	d := sampleDocument(3)
	d.Compute()
	path := filepath.Join(t.TempDir(), "out.json")
	if err := d.Write(path); err != nil {
		t.Fatal(err)
	}
	got, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	again := *got
	again.Compute()
	if diff := cmp.Diff(got.Figures, again.Figures); diff != "" {
		t.Errorf("figures recomputed from the file differ:\n%s", diff)
	}
	if len(got.Samples) != len(d.Samples) || len(got.Control) == 0 {
		t.Errorf("%d samples, %d control figures", len(got.Samples), len(got.Control))
	}
}

func TestDocumentWithoutSamplesIsStillJSON(t *testing.T) {
	d := sampleDocument(0)
	d.Compute()
	if err := d.Write(filepath.Join(t.TempDir(), "out.json")); err != nil {
		t.Errorf("an empty run cannot be written: %v", err)
	}
	var b bytes.Buffer
	d.Render(&b, false)
	if !strings.Contains(b.String(), "nothing to show") || strings.Contains(b.String(), "ratio to loopback") {
		t.Errorf("an empty run shows tables:\n%s", b.String())
	}
}

func TestRenderShowsSeedAndVerdicts(t *testing.T) {
	d := sampleDocument(15)
	d.Compute()
	var b bytes.Buffer
	d.Render(&b, false)
	text := b.String()
	for _, want := range []string{
		"veth iptables-nft, ClusterIP", "0.60 [0.60 0.60]", // ours over loopback
		"0.99", // the article's veth ClusterIP ÷ pod IP
		"1.11", // the article's veth + eBPF over veth
		"PASS", "not shown", "iptables v1.8.9 (nf_tables)", `["policy"]`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b[") {
		t.Error("colour codes without a terminal")
	}
	if strings.Contains(text, "CONTROL FAILS") || strings.Contains(text, "INTERRUPTED") {
		t.Error("a clean run is called unclean")
	}
}

func TestRenderNamesAnUncleanRun(t *testing.T) {
	d := sampleDocument(15)
	for i, s := range d.Samples {
		d.Samples[i].Noisy = true
		if s.Subject == BaseAgain {
			d.Samples[i].Rate *= 1.1
		}
	}
	d.Complete = false
	d.Failures = map[string]string{"macvlan nft": "no parent"}
	d.Compute()
	var b bytes.Buffer
	d.Render(&b, false)
	for _, want := range []string{"A/A CONTROL FAILS", "INTERRUPTED", "NOISY", "FAILED: macvlan nft: no parent"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	for _, c := range []struct {
		command string
		resumes bool
	}{{"", true}, {"cluster", false}, {"advise", false}} {
		d.Settings.Command = c.command
		b.Reset()
		d.Render(&b, false)
		if strings.Contains(b.String(), "--resume") != c.resumes {
			t.Errorf("%q resumes: %v\n%s", c.command, !c.resumes, b.String())
		}
	}
}

func TestTableAlignsWhatIsSeen(t *testing.T) {
	var b bytes.Buffer
	table{head: []string{"a", "b", "c"}, rows: [][]string{{"÷–÷", paint(stats.Pass, true), "x"}, {"abc", "PASS", "x"}}}.write(&b)
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if at1, at2 := visible(lines[1]), visible(lines[2]); at1 != at2 {
		t.Errorf("rows end at %d and %d:\n%s", at1, at2, b.String())
	}
}

// The kernel's tag of a program is of its instructions, which hold what is drawn by lot
// at each load.
func TestProgramsAreKnownByTheirBuild(t *testing.T) {
	of := func(status string) string { return Subject{ProgramSet: json.RawMessage(status)}.Implementation() }
	one := of(`{"build":"ad50","programs":[{"name":"from_pod_host","tag":"3fb3"}]}`)
	if again := of(`{"build":"ad50","programs":[{"name":"from_pod_host","tag":"9267"}]}`); again != one {
		t.Errorf("another load is %q, the first is %q", again, one)
	}
	if other := of(`{"build":"ad51","programs":[{"name":"from_pod_host","tag":"3fb3"}]}`); other == one {
		t.Errorf("another build is %q, too", other)
	}
}

// Not renamed over: /dev/stdout would be a file from then on.
func TestWhatIsNoFileIsWrittenTo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "stdout")
	if err := os.Symlink(os.DevNull, path); err != nil {
		t.Fatal(err)
	}
	if err := (&Document{Schema: Schema}).Write(path); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().IsRegular() {
		t.Errorf("%s is %v now; %v", path, st.Mode(), err)
	}
}

func TestAFileOfSeveralRunsHasRuns(t *testing.T) {
	for text, want := range map[string]string{
		`{"schema": "` + BundleSchema + `", "runs": [null]}`:                                                             "runs[0] is empty",
		`{"schema": "` + BundleSchema + `", "runs": [{"schema": "later/v9"}]}`:                                           `runs[0]: schema "later/v9"`,
		`{"schema": "` + BundleSchema + `", "runs": []}`:                                                                 "runs is empty",
		`{"schema": "` + BundleSchema + `", "runs": [{"schema": "` + schemaBefore + `"}, {"schema": "` + Schema + `"}]}`: "",
	} {
		path := filepath.Join(t.TempDir(), "runs.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ReadAny(path)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// Intervals of few rounds are not judged, and so none of them misses.
func TestControlOfFewRoundsIsNotJudged(t *testing.T) {
	for rounds, judged := range map[int]bool{stats.MinControl - 1: false, stats.MinControl: true} {
		d := sampleDocument(rounds)
		d.Compute()
		if misses, _, all := d.controlMisses(); misses != 0 || (all > 0) != judged || len(d.Control) == 0 {
			t.Errorf("%d rounds: %d of %d intervals miss", rounds, misses, all)
		}
	}
}

// The plugins of foreign networks are named, whoever does their Services.
func TestForeignNetworksAreNamedWithTheirPlugins(t *testing.T) {
	d := sampleDocument(1)
	for _, name := range []string{"a", "b"} {
		d.Subjects = append(d.Subjects, Subject{ID: "cni " + name + ", pod IP", Contestant: "cni " + name + " iptables-nft", Mode: "cni " + name,
			By: "iptables-nft", Via: PodIP, Backend: "iptables v1.8.9 (nf_tables), bridge + " + name})
	}
	d.Compute()
	var out bytes.Buffer
	d.Render(&out, false)
	for _, want := range []string{"iptables-nft: iptables v1.8.9 (nf_tables)\n", "cni a iptables-nft: iptables v1.8.9 (nf_tables), bridge + a\n", "bridge + b\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
