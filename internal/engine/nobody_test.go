// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"syscall"
	"testing"
)

// A port that packets to the node have just been refused at is a Service's as
// soon as the Service is in force, and the node's own again when it is gone.
func TestAPortChangesHandsAtOnce(t *testing.T) {
	w := newEdgeWorld(t)
	w.serve(w.pod, "pod", 8080)
	for range 5 {
		w.must(func(e *Engine) error { _, err := makeAll(e, nil); return err })
		each(t, func(t *testing.T, network string, v6 bool) {
			if network == "udp" {
				return // its refusals are so many a second
			}
			for _, to := range externals[v6][:2] {
				for range 2 { // the second time it is known
					if name, _, err := ask(w.client, network, to); !errors.Is(err, syscall.ECONNREFUSED) {
						t.Errorf("%s is nobody's: %q, %v", to, name, err)
					}
				}
			}
		})
		w.replace([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, nil)
		each(t, func(t *testing.T, network string, v6 bool) {
			for _, to := range externals[v6][:2] {
				if name, _, err := ask(w.client, network, to); err != nil || name != "pod" {
					t.Errorf("%s: %q, %v", to, name, err)
				}
			}
		})
	}
}
