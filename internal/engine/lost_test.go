// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// Whose pod an endpoint is, is in its record alone. Where that is lost, an agent finds
// the pod by its address.
func TestAPodWhoseRecordIsLostKeepsItsPolicy(t *testing.T) {
	n := newNode(t)
	a, b, c := n.pod(1), n.pod(2), n.pod(3)
	tell := func(m *policy.Model) {
		for i, name := range []string{"a", "b"} {
			p := kubePod(name)
			p.Addrs = []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.9.0.%d", i+1))}
			m.SetPod(p)
		}
		m.SetPolicy(kubePolicy("closed", "b"))
	}
	n.asAgent(func(e *Engine) error {
		if err := e.FeedPolicies(tell); err != nil {
			return err
		}
		for path, name := range map[string]string{a: "a", b: "b", c: "c"} {
			spec := labelled(path, state.OwnerCNI, named(name))
			spec.Masquerade = &state.Masquerade{Inside: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd09::/64")}}
			if _, err := e.AddEndpoint(context.Background(), spec); err != nil {
				return err
			}
		}
		return nil
	})
	worn := n.masqueraded()
	if len(worn) != 3 {
		t.Fatal(worn)
	}
	n.hold(a, "10.9.0.2", false)
	if err := os.RemoveAll(n.scope.StateDir); err != nil {
		t.Fatal(err)
	}
	n.asAgent(func(e *Engine) error {
		n.hold(a, "10.9.0.2", false)
		if err := e.FeedPolicies(tell); err != nil {
			return err
		}
		n.hold(a, "10.9.0.2", false)
		n.hold(b, "10.9.0.1", true)
		n.hold(a, "10.9.0.3", false) // a pod that nobody tells of
		return e.syncMasquerade()
	})
	if got := n.masqueraded(); !maps.Equal(got, worn) {
		t.Errorf("masqueraded are %v, and were %v", got, worn)
	}
}

// masqueraded are the groups of the endpoints that are, by the tables.
func (n *node) masqueraded() (groups map[uint32]uint32) {
	n.t.Helper()
	n.must(func(e *Engine) (err error) { groups, err = e.dp.Masquerade.All(); return err })
	return groups
}

// A bpffs that was unmounted takes tables and links along. The pods that are there come
// back with the next opening, and are held to what they were.
func TestPodsWhoseTablesAreLostComeBack(t *testing.T) {
	for name, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.opts.NoTCX = noTCX
			a, b, c := n.pod(1), n.pod(2), n.pod(3)
			for path, name := range map[string]string{a: "a", b: "b", c: "c"} {
				n.addLabelled(path, state.OwnerCLI, map[string]string{"app": name})
			}
			n.must(func(e *Engine) error { return e.ApplyPolicyFile([]policy.Policy{closedTo("p", "b")}, nil) })
			n.hold(a, "10.9.0.2", false)
			if err := datapath.Remove(n.scope.BPFFS); err != nil {
				t.Fatal(err)
			}
			n.run("ip netns del %s-p3; ip link del h3 2>/dev/null || true", n.name)
			n.namespace(n.name + "-p3")
			if got := n.endpoints(); len(got) != 2 {
				t.Fatalf("%+v", got)
			}
			n.hold(a, "10.9.0.2", false)
			n.hold(b, "10.9.0.1", true)
			n.must(func(e *Engine) error {
				eps, err := e.Endpoints()
				for _, ep := range eps {
					err = errors.Join(err, e.CheckEndpoint(ep.ID))
				}
				return err
			})
		})
	}
}

// So do other nodes: who only knew his own pods would have sent theirs to a tunnel that
// nothing leads out of.
func TestNodesWhoseTablesAreLostComeBack(t *testing.T) {
	n := newNode(t)
	w := &edgeWorld{node: n, home: netns.Path(n.name)}
	w.wire(0, 1)
	if _, err := n.add(n.pod(1)); err != nil {
		t.Fatal(err)
	}
	w.tunnelled()
	told := func() (nets map[datapath.Prefix]uint32, wires, warnings int) {
		w.must(func(e *Engine) error {
			var err error
			nets, err = e.dp.Nets.All()
			s, wrong := e.Status()
			for _, warning := range s.Warnings {
				if strings.Contains(warning, "node sync") {
					warnings++
				}
			}
			wires = len(e.dp.WireDevices())
			return errors.Join(err, wrong)
		})
		return nets, wires, warnings
	}
	before, wires, _ := told()
	if len(before) == 0 || wires == 0 {
		t.Fatalf("networks of others %v, %d devices lead there", before, wires)
	}
	if err := datapath.Remove(n.scope.BPFFS); err != nil {
		t.Fatal(err)
	}
	after, now, warnings := told()
	if !maps.Equal(after, before) || now != wires || warnings > 0 {
		t.Errorf("networks of others are %v, and were %v; %d devices lead there, and %d did; %d warnings", after, before, now, wires, warnings)
	}
}

// Who takes programs off pods' interfaces opens them. Status says so, and an agent puts
// the programs back.
func TestProgramsThatAreTakenOffComeBack(t *testing.T) {
	for name, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.opts.NoTCX = noTCX
			a, b := n.pod(1), n.pod(2)
			for path, name := range map[string]string{a: "a", b: "b"} {
				n.addLabelled(path, state.OwnerCLI, map[string]string{"app": name})
			}
			n.must(func(e *Engine) error { return e.ApplyPolicyFile([]policy.Policy{closedTo("p", "b")}, nil) })
			warns := func(want int) {
				t.Helper()
				n.must(func(e *Engine) error {
					s, err := e.Status()
					off := 0
					for _, w := range s.Warnings {
						if strings.Contains(w, "are off its interface") {
							off++
						}
					}
					if off != want {
						t.Errorf("%d endpoints are said to have lost their programs, want %d: %q", off, want, s.Warnings)
					}
					return err
				})
			}
			warns(0)
			if noTCX {
				n.run("tc qdisc del dev h1 clsact && tc qdisc del dev h2 clsact")
			} else {
				n.detachLinks()
			}
			n.hold(a, "10.9.0.2", true) // so the test can fail
			warns(2)
			n.must(func(e *Engine) error {
				back, err := e.Reattach()
				if len(back) != 2 {
					t.Errorf("%+v", back)
				}
				return err
			})
			warns(0)
			n.hold(a, "10.9.0.2", false)
			n.hold(b, "10.9.0.1", true)
		})
	}
}

// detachLinks takes the links of all endpoints off, and leaves their pins.
func (n *node) detachLinks() {
	n.t.Helper()
	pins, err := filepath.Glob(filepath.Join(n.scope.BPFFS, "links", "ep-*"))
	if err != nil || len(pins) == 0 {
		n.t.Fatal(pins, err)
	}
	for _, pin := range pins {
		l, err := link.LoadPinnedLink(pin, nil)
		if err == nil {
			err = errors.Join(l.Detach(), l.Close())
		}
		if err != nil {
			n.t.Fatal(err)
		}
	}
}

// What was recorded of Services that went with the tables is not in the way of those that are given again. Until somebody
// writes, status says that pods are held to nothing; whoever writes restores them, whatever it is about.
func TestServicesWhoseTablesAreLostCanBeGivenAgain(t *testing.T) {
	n := newNode(t)
	var said []string
	n.opts.Notify = func(s string) { said = append(said, s) }
	one := svc("10.96.0.1:80", "10.9.0.2:80")
	one.Affinity = time.Minute
	if service.Plain(one) {
		t.Fatal("it has no record, and shows nothing")
	}
	ep, err := n.add(n.pod(1))
	if err != nil {
		t.Fatal(err)
	}
	n.must(func(e *Engine) error { return e.AddServices(one) })
	if err := datapath.Remove(n.scope.BPFFS); err != nil {
		t.Fatal(err)
	}
	warned := func() (open int) {
		n.opts.ReadOnly = true
		defer func() { n.opts.ReadOnly = false }()
		n.must(func(e *Engine) error {
			s, err := e.Status()
			for _, w := range s.Warnings {
				if strings.Contains(w, "was lost with the tables") {
					open++
				}
			}
			return err
		})
		return open
	}
	if warned() != 1 {
		t.Error("status does not say that a pod is held to nothing")
	}
	n.must(func(e *Engine) error { return e.AddServices(one) })
	if got := strings.Join(said, "\n"); !strings.Contains(got, "service tcp 10.96.0.1:80 was lost") || !strings.Contains(got, fmt.Sprintf("endpoint %d ", ep.ID)) {
		t.Errorf("said: %s", got)
	}
	if warned() != 0 || len(n.services()) != 1 {
		t.Errorf("Services are %v", n.services())
	}
	n.must(func(e *Engine) error { return e.CheckEndpoint(ep.ID) })
}

// Who does not even see the directory of a pod's namespace, as an agent whose container has not got it, does not take the
// pod for gone: it is told, and the pod comes back when somebody sees it.
func TestAPodOutOfReachIsTold(t *testing.T) {
	n := newNode(t)
	var told strings.Builder
	n.opts.Notify = func(s string) { fmt.Fprintln(&told, s) }
	dir, away := filepath.Join(t.TempDir(), "netns"), filepath.Join(t.TempDir(), "away")
	path := filepath.Join(dir, "pod")
	move := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(dir, 0o755), os.Symlink(n.macvlans()[0], path)); err != nil {
		t.Fatal(err)
	}
	if _, err := n.add(path); err != nil {
		t.Fatal(err)
	}
	move(dir, away)
	n.must(func(e *Engine) error {
		s, err := e.Status()
		text := strings.Join(s.Warnings, "\n")
		if !strings.Contains(text, "there is no "+dir+" here") || strings.Contains(text, "its interface is gone") {
			t.Errorf("status says %q", text)
		}
		return err
	})
	if err := datapath.Remove(n.scope.BPFFS); err != nil {
		t.Fatal(err)
	}
	told.Reset()
	if got := n.endpoints(); len(got) != 0 || !strings.Contains(told.String(), "was lost with the tables") || !strings.Contains(told.String(), "there is no "+dir+" here") {
		t.Errorf("endpoints %+v, told %q", got, told.String())
	}
	move(away, dir)
	if got := n.endpoints(); len(got) != 1 || got[0].Netns != path || !strings.Contains(told.String(), "and is restored") {
		t.Errorf("endpoints %+v, told %q", got, told.String())
	}
}
