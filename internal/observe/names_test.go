// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"testing"
	"time"
)

// Policies are read anew for a set without a name once in a while, not for each of its packets.
func TestASetWithoutANameIsAskedForOnceInAWhile(t *testing.T) {
	start := time.Now()
	var c nameCache
	c.modelRead = start
	reads := 0
	for now := start; now.Before(start.Add(10 * nameAge)); now = now.Add(time.Millisecond) {
		if c.maybeNamed(7, now) {
			reads++
			c.modelRead = now
		}
	}
	if reads != 10 {
		t.Errorf("%d times in %v, want 10", reads, 10*nameAge)
	}
	later := c.modelRead.Add(nameAgeGuess)
	if !c.maybeNamed(8, later) {
		t.Error("another set is not asked for")
	}
	if c.maybeNamed(9, later.Add(-time.Millisecond)) {
		t.Error("policies that have just been read are read again")
	}
	if c.maybeNamed(8, later.Add(3*nameAge)); len(c.unnamed) != 1 {
		t.Errorf("%d sets are remembered, want 1", len(c.unnamed))
	}
}
