// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/bench/runner"
)

// A base that differs from itself is said, of each load; too few rounds are no control.
func TestAControlThatFailsIsSaid(t *testing.T) {
	made := func(share float64, rounds int) string {
		r := &Report{Rounds: rounds, Contestants: []string{base, base + again}}
		for round := 1; round <= rounds; round++ {
			for name, rate := range map[string]float64{base: 1, base + again: share} {
				for _, scenario := range Scenarios {
					rate := rate * float64(round) // a machine that changes its speed
					r.Samples = append(r.Samples, runner.Sample{Case: runner.Case{Subject: name, Scenario: scenario}, Round: round, Rate: rate, TurnRates: []float64{rate}})
				}
			}
		}
		var out bytes.Buffer
		r.Render(&out)
		return out.String()
	}
	if s := made(1, 15); strings.Contains(s, "A/A") {
		t.Errorf("the control holds:\n%s", s)
	}
	if s := made(.9, 15); !strings.Contains(s, "\nCRR: A/A CONTROL FAILS") || !strings.Contains(s, "\nRR: A/A CONTROL FAILS") {
		t.Errorf("the control fails:\n%s", s)
	}
	if s := made(.9, 3); strings.Contains(s, "CONTROL FAILS") || !strings.Contains(s, "\nCRR: A/A control: not judged, 3 rounds") {
		t.Errorf("three rounds:\n%s", s)
	}
}
