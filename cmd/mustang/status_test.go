// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
)

// What a kernel lacks is told in the words that docs/kernels.md has: a person
// who reads one finds the other.
func TestStatusSaysWhatTheKernelLacksAsTheDocsDo(t *testing.T) {
	docs, err := os.ReadFile("../../docs/kernels.md")
	if err != nil {
		t.Fatal(err)
	}
	none, no4 := datapath.Features{}, datapath.Features{BigTCP6: true}
	sentences := append(none.Without(), no4.Without()...)
	if len(none.Without()) < 4 || len(no4.Without()) < 4 {
		t.Fatalf("a kernel that has nothing is said to lack only %q", sentences)
	}
	for _, s := range sentences {
		if !strings.Contains(string(docs), s) {
			t.Errorf("docs/kernels.md does not say %q", s)
		}
	}
	all := datapath.Features{TCX: true, SetRetval: true, BigTCP6: true, BigTCP4: true, EndSockets: true}
	if said := all.Without(); len(said) > 0 {
		t.Errorf("a kernel that has everything is said to lack %q", said)
	}
}

// The test's own kernel ends sockets and has BIG TCP: other tests do both.
func TestProbeFindsWhatOtherTestsUse(t *testing.T) {
	f := datapath.Probe()
	if !f.EndSockets || !f.BigTCP6 {
		t.Errorf("sockets ended %v, BIG TCP for IPv6 %v, on a kernel that has both", f.EndSockets, f.BigTCP6)
	}
}
