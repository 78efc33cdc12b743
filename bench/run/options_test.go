// SPDX-License-Identifier: Apache-2.0

package run

import (
	"strings"
	"testing"
)

// A rate of which a turn has no request is refused, and what is named instead is taken.
func TestTailsFitIntoATurn(t *testing.T) {
	o := Defaults()
	o.Duration, o.Turns, o.TailRate = 300e6, 20, 66
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "use 67 or more") {
		t.Errorf("one request in 15.2 ms, in turns of 15: %v", err)
	}
	o.TailRate = 67
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
}
