// SPDX-License-Identifier: Apache-2.0

package run

// Going on with a run that was cut short.

import (
	"fmt"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
)

// sameMachine says why rounds of now cannot stand beside those of an earlier run.
func sameMachine(then, now *report.Document) error {
	a, b := then.Machine, now.Machine
	switch {
	case a.Kernel != b.Kernel:
		return fmt.Errorf("resume: the run was on kernel %s, this is %s: start a new one", a.Kernel, b.Kernel)
	case a.CPU != b.CPU || a.CPUs != b.CPUs:
		return fmt.Errorf("resume: the run was on %d CPUs (%s), here are %d (%s): start a new one", a.CPUs, a.CPU, b.CPUs, b.CPU)
	case then.Settings.ClientCPU != now.Settings.ClientCPU || then.Settings.CPUSource != now.Settings.CPUSource:
		return fmt.Errorf("resume: the run was on CPU %d with CPU time from %s, this would be on %d from %s: start a new one",
			then.Settings.ClientCPU, then.Settings.CPUSource, now.Settings.ClientCPU, now.Settings.CPUSource)
	}
	return nil
}

// sameSubjects says whether the contestants are still those of an earlier run.
// One that could not be built now fails in the rest, and is no reason to refuse.
func sameSubjects(then, now []report.Subject) error {
	for _, s := range now {
		i := slices.IndexFunc(then, func(o report.Subject) bool { return o.ID == s.ID })
		if i < 0 {
			return fmt.Errorf("resume: %s was not in the run: start a new one", s.ID)
		}
		if was, is := then[i].Implementation(), s.Implementation(); was != is {
			return fmt.Errorf("resume: %s was %s and is %s: start a new one", s.ID, was, is)
		}
	}
	return nil
}

// stillFailed are an earlier run's failures that are true yet: not of a contestant that is
// up now, nor of a case that has given a sample since.
func stillFailed(then *report.Document, now []report.Subject) map[string]string {
	out := map[string]string{}
	for name, text := range then.Failures {
		up := slices.ContainsFunc(now, func(s report.Subject) bool { return s.Contestant == name }) && !strings.HasPrefix(text, name+", ") // a case's begins with its subject
		if !up && !recovered(text, then.Samples) {
			out[name] = text
		}
	}
	return out
}

// recovered says whether the last sample of the case that a failure tells of is one.
func recovered(failure string, samples []runner.Sample) (is bool) {
	for _, s := range samples {
		if strings.HasPrefix(failure, s.Case.String()+": ") {
			is = s.Usable()
		}
	}
	return is
}
