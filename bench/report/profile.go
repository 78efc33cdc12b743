// SPDX-License-Identifier: Apache-2.0

package report

// Where the CPU time of a load goes: sampled stacks, and the split into user, system
// and softirq.

import (
	"cmp"
	"slices"
	"strings"
)

// Profile is where the load's CPU was while one path was loaded.
type Profile struct {
	Subject  string  `json:"subject"`
	Scenario string  `json:"scenario"`
	Seconds  float64 `json:"seconds"`
	// By says what sampled: perf with stacks, or the kernel's own tick without.
	By string `json:"by"`
	// Shares of the time that the CPU was busy.
	User    float64 `json:"user"`
	System  float64 `json:"system"`
	Softirq float64 `json:"softirq"`
	// Work is what was done meanwhile: transactions, or 10⁹ bytes of a stream.
	Work  float64 `json:"work"`
	Busy  float64 `json:"busy"` // CPU seconds
	Stack *Frame  `json:"stack,omitempty"`
}

// Frame is a function with what it called, by number of samples.
type Frame struct {
	Name  string   `json:"n"`
	Count int      `json:"c"` // samples in it or in what it called
	Calls []*Frame `json:"s,omitempty"`
}

// Add counts a stack, the outermost function first.
func (f *Frame) Add(stack []string, n int) {
	f.Count += n
	for _, name := range stack {
		i := slices.IndexFunc(f.Calls, func(c *Frame) bool { return c.Name == name })
		if i < 0 {
			i = len(f.Calls)
			f.Calls = append(f.Calls, &Frame{Name: name})
		}
		f = f.Calls[i]
		f.Count += n
	}
}

// Prune drops what has less than so many samples, and sorts by name.
func (f *Frame) Prune(least int) {
	f.Calls = slices.DeleteFunc(f.Calls, func(c *Frame) bool { return c.Count < least })
	slices.SortFunc(f.Calls, func(a, b *Frame) int { return cmp.Compare(a.Name, b.Name) })
	for _, c := range f.Calls {
		c.Prune(least)
	}
}

// Depth is of the deepest stack.
func (f *Frame) Depth() int {
	deepest := 0
	for _, c := range f.Calls {
		deepest = max(deepest, c.Depth())
	}
	return deepest + 1
}

// Share is the share of samples that have a function anywhere whose name begins in one of
// these ways: a sample that has several of them counts once.
func (f *Frame) Share(prefixes ...string) float64 {
	if f.Count == 0 {
		return 0
	}
	return float64(f.having(prefixes)) / float64(f.Count)
}

func (f *Frame) having(prefixes []string) (n int) {
	if slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(f.Name, prefix) }) {
		return f.Count
	}
	for _, c := range f.Calls {
		n += c.having(prefixes)
	}
	return n
}
