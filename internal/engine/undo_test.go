// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	peers "github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/state"
)

// A change fails, and undoing it does: the next change of the same process, as an agent's,
// undoes it first. While that cannot be, no other change takes effect.
func TestTheNextChangeUndoesWhatCouldNotBeUndone(t *testing.T) {
	left := 0
	for i := 1; ; i++ {
		n := newNode(t)
		fault := &breaking{left: 1 << 30, err: errors.New("injected fault"), forEver: true}
		n.opts.Faults = fault.wrap
		var want []state.Binding
		n.must(func(e *Engine) error { return e.AddServices(twoServices()...) })
		done := false
		n.must(func(e *Engine) (err error) {
			if want, err = e.Services(); err != nil {
				return err
			}
			fault.left = i
			if done = e.UpsertServices(threeServices()) == nil; done {
				return nil
			}
			other := svc("10.96.0.4:80", "10.9.0.8:80")
			if e.undo != nil {
				left++
				fault.left = 1
				if err := e.UpsertServices([]state.Service{other}); err == nil {
					t.Errorf("write %d: another change took effect", i)
				}
			}
			fault.left = 1 << 30
			if err := e.BackendsGone(); err != nil { // which has the journal meanwhile
				return err
			}
			if err := e.UpsertServices([]state.Service{other}); err != nil {
				return err
			}
			added := bound(t, other)
			added.Number = 3
			want = append(want, added)
			got, err := e.Services()
			if d := cmp.Diff(want, got, compareAddrs); d != "" || e.undo != nil {
				t.Errorf("write %d: %s", i, d)
			}
			slots, e1 := e.dp.Slots.All()
			backends, e2 := e.dp.Backends.All()
			if len(slots) != 4 || len(backends) != 4 {
				t.Errorf("write %d: %d slots and %d backends are left, want 4", i, len(slots), len(backends))
			}
			return errors.Join(err, e1, e2)
		})
		if done {
			break
		}
		if d := cmp.Diff(want, n.services(), compareAddrs); d != "" {
			t.Errorf("write %d, another process: %s", i, d)
		}
	}
	if left == 0 {
		t.Error("each change could be undone")
	}
}

// The journals of other changes meanwhile keep what is to be undone, also when their process
// is killed.
func TestWhatIsToBeUndoneOutlivesOtherChanges(t *testing.T) {
	for what, change := range map[string]func(e *Engine, pod string) error{
		"endpoint": func(e *Engine, pod string) error {
			_, err := e.AddEndpoint(t.Context(), EndpointSpec{Netns: pod, IfName: "eth0", Owner: state.OwnerCLI})
			return err
		},
		"backends": func(e *Engine, _ string) error { return e.BackendsGone() },
		"policies": func(e *Engine, _ string) error {
			return e.ApplyPolicyFile(nil, map[string]map[string]string{"default": {"a": "b"}})
		},
		"nodes": func(e *Engine, _ string) error {
			return e.ApplyNodes(state.OwnerCLI, nil, peers.SettingsSpec{})
		},
		"edge":   func(e *Engine, _ string) error { return e.SetEdge(Edge{}) },
		"killed": func(e *Engine, _ string) error { return e.begin(operation{Kind: opGone}) },
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			fault := &breaking{left: 1 << 30, err: errors.New("injected fault"), forEver: true}
			n.opts.Faults = fault.wrap
			n.must(func(e *Engine) error { return e.AddServices(twoServices()...) })
			before, pod := n.services(), n.pod(1)
			changed := false
			for i := 1; !changed; i++ {
				n.must(func(e *Engine) error {
					fault.left = i
					if err := e.UpsertServices(threeServices()); err == nil {
						t.Fatal("nothing was left to be undone")
					}
					fault.left = 1 << 30
					now, err := e.Services()
					if changed = cmp.Diff(before, now, compareAddrs) != ""; !changed || err != nil {
						return err
					}
					return change(e, pod)
				})
			}
			if d := cmp.Diff(before, n.services(), compareAddrs); d != "" {
				t.Error(d)
			}
		})
	}
}

func twoServices() []state.Service {
	return []state.Service{svc("10.96.0.1:80", "10.9.0.1:80", "10.9.0.2:80"), svc("10.96.0.2:80", "10.9.0.3:80")}
}

// threeServices changes both, and adds one.
func threeServices() []state.Service {
	return []state.Service{
		svc("10.96.0.1:80", "10.9.0.4:80", "10.9.0.5:80", "10.9.0.6:80"),
		svc("10.96.0.2:80", "10.9.0.3:80", "10.9.0.1:80"), svc("10.96.0.3:80", "10.9.0.7:80"),
	}
}
