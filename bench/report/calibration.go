// SPDX-License-Identifier: Apache-2.0

package report

// The bench judged by itself: equal paths must come out as equal, and a planted
// slowdown must be found.

import (
	"fmt"
	"io"

	"github.com/mustang-net/mustang/bench/stats"
)

// Planted is the share by which a path is made slower that must be found.
const Planted = 0.05

// BaseSlow is the subject that was made slower.
const BaseSlow = "loopback, slowed by 5 %"

// LoopbackNumber names loopbacks that are alike: the base, its control, more.
func LoopbackNumber(i int) string {
	switch i {
	case 0:
		return Base
	case 1:
		return BaseAgain
	}
	return fmt.Sprintf("loopback %d", i+1)
}

// controlMisses returns how many A/A intervals exclude 1, and how many may, of all of so
// many rounds that they are judged: one in eight, where one in twenty is expected.
func (d *Document) controlMisses() (misses, allowed, all int) {
	for _, c := range d.Control {
		if c.Ratio.N < stats.MinControl {
			continue
		}
		all++
		if !stats.ControlHolds(c.Ratio) {
			misses++
		}
	}
	return misses, all / 8, all
}

// plantedFound says whether a figure of the slowed loopback shows it: its whole
// interval on the slow side of 1, and the planted share in reach.
func plantedFound(f Figure) bool {
	if f.Metric.Lower() {
		return f.Ratio.Low > 1 && f.Ratio.High > 1+Planted/2
	}
	return f.Ratio.High < 1 && f.Ratio.Low < 1-Planted/2
}

// Calibrated judges a calibration run.
func (d *Document) Calibrated() bool {
	misses, allowed, all := d.controlMisses()
	for _, f := range d.Figures {
		if f.Subject == BaseSlow && !plantedFound(f) {
			return false
		}
	}
	return all > 0 && misses <= allowed && d.Complete
}

func (d *Document) renderCalibration(w io.Writer, color bool) {
	t := table{head: []string{"equal paths: must enclose 1", "core", "ratio", ""}}
	for _, c := range d.Control {
		verdict := stats.Pass
		switch {
		case c.Ratio.N < stats.MinControl:
			verdict = "not judged"
		case !stats.ControlHolds(c.Ratio):
			verdict = stats.Fail
		}
		t.rows = append(t.rows, []string{fmt.Sprintf("%s: %s ÷ %s", head(c.Metric), c.Subject, c.Over), c.Cores, interval3(c.Ratio), paint(verdict, color)})
	}
	t.write(w)
	t = table{head: []string{"planted: must be found", "core", "ratio", ""}}
	for _, f := range d.Figures {
		if f.Subject != BaseSlow {
			continue
		}
		verdict := stats.Pass
		if !plantedFound(f) {
			verdict = stats.Fail
		}
		t.rows = append(t.rows, []string{head(f.Metric) + ": " + f.Subject, f.Cores, interval3(f.Ratio), paint(verdict, color)})
	}
	t.write(w)
	misses, allowed, all := d.controlMisses()
	fmt.Fprintf(w, "\nof %d intervals of equal paths %d exclude 1; %d may\n", all, misses, allowed)
}

// interval3 prints a ratio that is near 1.
func interval3(e stats.Estimate) string {
	return fmt.Sprintf("%.3f [%.3f %.3f]", e.Median, e.Low, e.High)
}
