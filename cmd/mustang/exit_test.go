// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os/exec"
	"testing"
)

// What nft or a plugin ended with is no exit status of the tool's.
func TestOthersExitStatusIsNotOurs(t *testing.T) {
	five := exec.Command("sh", "-c", "exit 5").Run()
	for _, c := range []struct {
		err  error
		want int
	}{
		{fmt.Errorf("load rules: %w", five), 1},
		{usagef("--rounds: %w", five), 2},
		{passedOn{five, 5}, 5},
		{passedOn{errors.New("no such program"), -1}, 1},
	} {
		if got := exitCode(c.err); got != c.want {
			t.Errorf("%v: status %d, want %d", c.err, got, c.want)
		}
	}
}
