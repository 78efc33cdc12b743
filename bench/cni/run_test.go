// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/mustang-net/mustang/bench/run"
)

// What a killed run left goes with the next one; a living one's stays.
func TestNamespacesOfKilledRunsGo(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	left := fmt.Sprintf("%s%d-0", spacePrefix, dead.ProcessState.Pid())
	t.Cleanup(func() { _ = netns.DeleteNamed(left) })
	mine, err := makeSpaces(1)
	t.Cleanup(func() {
		if err := removeSpaces(mine); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	makeNamed(t, left)
	if err := removeDead(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(netnsDir, left)); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", left, err)
	}
	if _, err := os.Lstat(mine[0].path); err != nil {
		t.Errorf("a living run's namespace: %v", err)
	}
}

// Two benches would measure each other.
func TestOneBenchAtATime(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	for end := time.Now().Add(10 * time.Minute); ; time.Sleep(time.Second) { // another package's test may be measuring
		unlock, err := run.Lock()
		if err == nil {
			defer unlock()
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	if _, err := Run(t.Context(), Options{Rounds: 1, Log: io.Discard}); err == nil || !strings.Contains(err.Error(), "another bench runs") {
		t.Errorf("beside another bench: %v", err)
	}
}

// A bar is neither passed nor missed by fewer rounds than a claim needs.
func TestFewRoundsShowNoBar(t *testing.T) {
	for rounds, want := range map[int]string{1: "p50 ≤ 10 not shown", 15: "p50 ≤ 10 passed"} {
		r := &Report{Rounds: rounds}
		for round := range rounds {
			for _, name := range []string{"mustang veth", Base} {
				r.Samples = append(r.Samples, Sample{Round: round, Contestant: name, Cell: "one", Add: []float64{1}, Del: []float64{1}})
			}
		}
		var out strings.Builder
		r.Render(&out)
		if s := out.String(); strings.Count(s, "p50 ≤ 10") != 1 || !strings.Contains(s, want) {
			t.Errorf("%d rounds: no %q in\n%s", rounds, want, s)
		}
	}
}

// A bar is judged by the interval, and by the rounds of its own cell.
func TestABarIsPassedByItsWholeInterval(t *testing.T) {
	for name, c := range map[string]struct {
		rounds, slow int // of the cell
		want         string
	}{
		"all below":                 {15, 0, "passed"},
		"the median below":          {15, 7, "not shown"},
		"all above":                 {15, 15, "missed"},
		"of two rounds of the cell": {2, 0, "not shown"},
	} {
		rounds := map[int][]float64{}
		for i := range c.rounds {
			rounds[i] = []float64{9}
			if i < c.slow {
				rounds[i] = []float64{50}
			}
		}
		if got := verdict("mustang veth", "one", rounds); got != "p50 ≤ 10 "+c.want {
			t.Errorf("%s: %s", name, got)
		}
	}
	r := &Report{Rounds: 15, Samples: []Sample{{Contestant: "mustang veth", Cell: Cells[3].Name, Add: []float64{1}}, {Contestant: Base, Cell: Cells[3].Name, Add: []float64{1}}}}
	var out strings.Builder
	if r.Render(&out); !strings.Contains(out.String(), "p99 ≤ 250 not shown") {
		t.Errorf("fifteen rounds, one of which fills the node:\n%s", out.String())
	}
}

func makeNamed(t *testing.T, name string) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	made, err := netns.NewNamed(name)
	if err != nil {
		t.Fatal(err)
	}
	made.Close()
	if err := netns.Set(home); err != nil {
		t.Fatal(err)
	}
}
