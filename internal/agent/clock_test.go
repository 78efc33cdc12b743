// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
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

// Whatever the agent has not been able to apply for a minute makes it ill, and a rollout waits there.
func TestHealthKnowsOfAllThatFails(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		a := w.agent
		a.sync.synced.Store(true)
		for what, r := range map[string]*retrying{
			"a Service": &a.sync.retrying, "policy": &a.policies.retrying, "nodes": &a.sync.membersRetry, "edge": &a.sync.edgeRetry,
			"edge, where the devices are": &a.sync.followRetry, "build's programs": &a.kept.upgrade, "taken off pods": &a.kept.reattach,
			"masqueraded": &a.kept.masquerade, "ways to other nodes": &a.kept.devices,
		} {
			r.note(time.Now().Add(-stuck / 2))
			if because := a.works().Because; len(because) > 0 {
				t.Errorf("%s has failed for half a minute: %q", what, because)
			}
			r.failed.Store(nil)
			r.note(time.Now().Add(-2 * stuck))
			if because := a.works().Because; len(because) != 1 || !strings.Contains(because[0], what) {
				t.Errorf("%s has failed for two minutes: %q", what, because)
			}
			r.succeeded()
		}
	})
}

// A broken pin stands for a kernel that refuses the new build's programs.
func TestAnUpgradeThatFailsIsNoted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		broken := filepath.Join(w.config.BPFFS, "links", "sock-connect4")
		check(t, os.MkdirAll(filepath.Dir(broken), 0o700))
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		check(t, err)
		defer m.Close()
		meta := filepath.Join(w.config.BPFFS, "maps", bpfgen.PodMapMstMetaV1)
		table, err := ebpf.LoadPinnedMap(meta, nil)
		check(t, err)
		defer table.Close()
		var now bpfgen.PodMeta
		check(t, table.Lookup(uint32(0), &now))
		now.Build = [32]byte{1}
		check(t, errors.Join(table.Put(uint32(0), now), m.Pin(broken)))
		if w.agent.upgrade(t.Context()); w.agent.kept.upgrade.failed.Load() == nil {
			t.Error("nobody notes that the upgrade failed")
		}
		check(t, os.Remove(broken))
		if w.agent.upgrade(t.Context()); w.agent.kept.upgrade.failed.Load() != nil {
			t.Error("it has succeeded since")
		}
	})
}

const day = 24 * time.Hour
