// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"testing"
	"time"
	"unsafe"
)

// asSet is t as it would have been read before the clock was set by that much: as package
// time keeps it, seconds begin at bit 30, and what was read of the other clock stays.
func asSet(t time.Time, by time.Duration) *time.Time {
	*(*uint64)(unsafe.Pointer(&t)) -= uint64(by/time.Second) << 30
	return &t
}

// A clock that is set forward makes no agent ill, and one that is set back hides nothing.
func TestHealthWhenTheClockIsSet(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	if now := time.Now(); now.Sub(*asSet(now, time.Hour)) != 0 || now.Round(0).Sub(asSet(now, time.Hour).Round(0)) != time.Hour {
		t.Fatal("package time keeps times otherwise by now")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		a := w.agent
		a.sync.synced.Store(true)
		for by, when := range map[time.Duration]string{day: "forward", -day: "back"} {
			for ago, well := range map[time.Duration]bool{0: true, 2 * stuck: false} {
				at := asSet(time.Now().Add(-ago), by)
				a.sync.alive.Store(at)
				if got := len(a.live().Because) == 0; got != well {
					t.Errorf("set %s, %v after its last turn: it lives: %v", when, ago, got)
				}
				a.sync.lives()
				a.policies.failed.Store(at)
				if got := len(a.works().Because) == 0; got != well {
					t.Errorf("set %s, %v after a failure: it works: %v", when, ago, got)
				}
				a.policies.failed.Store(nil)
			}
		}
	})
}

const day = 24 * time.Hour
