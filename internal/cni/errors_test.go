// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/internal/state"
)

// A runtime is told all that went wrong, and of what, by the code that one part has.
func TestARuntimeIsToldAllOfAnError(t *testing.T) {
	taken := types.NewError(errPortTaken, "port 80 is taken", "by c7")
	plain := errors.New("the disk is full")
	for name, c := range map[string]struct {
		err  error
		want *types.Error
	}{
		"plain":        {plain, types.NewError(999, "the disk is full", "")},
		"coded":        {taken, taken},
		"wrapped":      {fmt.Errorf("connect pod c1: %w", taken), types.NewError(errPortTaken, "connect pod c1: port 80 is taken; by c7", "")},
		"joined":       {errors.Join(plain, taken), types.NewError(errPortTaken, "the disk is full\nport 80 is taken; by c7", "")},
		"alone":        {errors.Join(nil, invalid("mode", "%q is unknown", "pigeon")), types.NewError(types.ErrInvalidNetworkConfig, `mode: "pigeon" is unknown`, "")},
		"by the agent": {responseOf(state.Endpoint{}, fmt.Errorf("add c1: %w", taken)).err(), types.NewError(errPortTaken, "add c1: port 80 is taken; by c7", "")},
	} {
		if d := cmp.Diff(c.want, coded(999, c.err)); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}
