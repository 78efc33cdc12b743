// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/internal/link"
)

// another is the container that calls are about from here on.
func (w *world) another(id string) {
	w.t.Helper()
	w.id, w.container = id, w.node+"-"+id
	space := w.container
	w.ip("netns", "add", space)
	w.t.Cleanup(func() { exec.Command("ip", "netns", "del", space).Run() })
}

// tiny is a pool of five addresses, which no other test's pods have, that run meanwhile.
func tiny() map[string]any {
	return map[string]any{"ipam": map[string]any{"type": "mustang", "pools": []string{"10.61.7.0/29"}}}
}

// A runtime that lost its state calls no DEL, and no GC: dead containers hold neither address nor host port, with an agent
// and without.
func TestDeadContainersHoldNothing(t *testing.T) {
	for _, agent := range []bool{false, true} {
		t.Run(fmt.Sprintf("agent=%v", agent), func(t *testing.T) {
			w := newWorld(t)
			if agent {
				w.agent("serves")
			}
			ported := tiny()
			ported["runtimeConfig"] = map[string]any{"portMappings": []any{map[string]any{"hostPort": 8081, "containerPort": 80, "protocol": "tcp", "hostIP": "127.0.0.1"}}}
			w.ip("-n", w.node, "link", "add", "up0", "type", "veth", "peer", "name", "up1")
			w.ip("-n", w.node, "addr", "add", "192.168.7.1/24", "dev", "up0")
			w.ip("-n", w.node, "link", "set", "up0", "up")
			w.ip("-n", w.node, "link", "set", "up1", "up")
			w.ip("-n", w.node, "route", "add", "default", "via", "192.168.7.2")
			var dead []string
			for i := range 5 {
				w.another(fmt.Sprintf("d%d", i))
				dead = append(dead, w.id)
				conf := tiny()
				if i == 0 {
					conf = ported
				}
				w.ok(w.call("ADD", conf, podArgs...))
			}
			w.another("n0")
			if e := w.call("ADD", tiny(), podArgs...); e == nil || e.Code != errExhausted {
				t.Errorf("all five are there: %v", e)
			}
			half := storeAt(w.state())
			making, err := half.Read(dead[4] + "@eth0")
			if err != nil {
				t.Fatal(err)
			}
			making.State = stateMaking // as its ADD is under way
			if err := half.Write(making.file(), making); err != nil {
				t.Fatal(err)
			}
			for _, id := range dead {
				w.ip("netns", "del", w.node+"-"+id)
			}
			w.ok(w.call("STATUS", tiny()))
			w.ok(w.call("ADD", ported, podArgs...))
			for i := range 3 {
				w.another(fmt.Sprintf("n%d", i+1))
				w.ok(w.call("ADD", tiny(), podArgs...))
			}
			w.another("n4")
			if e := w.call("ADD", tiny(), podArgs...); e == nil || e.Code != errExhausted {
				t.Errorf("one is being made, and four are there: %v", e)
			}
			for _, id := range dead { // late
				w.id, w.container = id, w.node+"-"+id
				w.ok(w.call("DEL", tiny()))
			}
			if eps := w.endpoints(); len(eps) != 4 {
				t.Errorf("the endpoints are %+v", eps)
			}
			w.id, w.container = "n4", w.node+"-n4"
			if e := w.call("ADD", ported, podArgs...); e == nil || e.Code != errPortTaken {
				t.Errorf("n0 has the host port: %v", e)
			}
			for i := range 5 {
				w.id = fmt.Sprintf("n%d", i)
				w.container = w.node + "-" + w.id
				w.ok(w.call("DEL", ported))
			}
			w.nothingLeft()
		})
	}
}

// Only who is ready, has an address of the pools, and would be seen if he were there is dead. An agent leaves to the plugin
// what it cannot see or undo.
func TestWhoIsDead(t *testing.T) {
	p, e := ownNode(t)
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/there", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/4194999/ns/net", dir+"/elsewhere"); err != nil {
		t.Fatal(err)
	}
	write := func(a attachment) {
		t.Helper()
		if err := p.store.Locked(func() error { return p.store.Write(a.file(), a) }); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{dir + "/there", dir + "/elsewhere"} {
		a := p.attached(t, path[len(dir)+1:], path)
		a.Mode = link.Veth
		write(a)
	}
	half, lent := p.attached(t, "half", dir+"/x"), p.attached(t, "lent", dir+"/x")
	half.State, lent.IPAM = stateMaking, "host-local"
	write(half)
	write(lent)
	check := func(agent bool, wantYours bool, want ...string) {
		t.Helper()
		p.by.agent = nil
		if agent {
			p.by.agent = e
		}
		list, yours, err := p.dead()
		var got []string
		for _, a := range list {
			got = append(got, a.ContainerID)
		}
		if err != nil || yours != wantYours || !slices.Equal(got, want) {
			t.Errorf("agent %v: dead are %q, yours %v, %v; want %q, %v", agent, got, yours, err, want, wantYours)
		}
	}
	check(false, false)
	check(true, false)
	gone := p.attached(t, "gone", dir+"/x")
	gone.Mode = link.Veth
	write(gone)
	check(false, false, "gone")
	check(true, false, "gone")
	unseen := p.attached(t, "unseen", dir+"/x/y")
	check(false, false, "gone")
	check(true, true, "gone")
	unseen.NetNS = "/proc/4194999/ns/net" // a process's
	write(unseen)
	check(false, false, "gone", "unseen")
	check(true, true, "gone")
	unseen.NetNS = dir + "/x" // mode macvlan: the plugin's to undo
	write(unseen)
	check(false, false, "gone", "unseen")
	check(true, true, "gone")
}

// What cannot be removed now is the next ADD's to remove, and keeps its addresses until then.
func TestADeadOneThatCannotBeRemovedStays(t *testing.T) {
	p, e := ownNode(t)
	a := p.attached(t, "gone", t.TempDir()+"/x")
	e.err = errors.New("the engine is busy")
	for range 2 {
		if err := p.reap(a); !errors.Is(err, e.err) {
			t.Fatalf("got %v", err)
		}
		r, found, err := p.store.find(a)
		if err != nil || !found || r.State != stateReady || p.store.ipam().Owner(a.Addrs[0]) != a.owner() {
			t.Errorf("its record is %+v, %v, %v", r, found, err)
		}
	}
	e.err = nil
	if err := p.reap(a); err != nil {
		t.Fatal(err)
	}
	if left, err := p.store.ipam().Owners(); len(left) > 0 || err != nil {
		t.Errorf("not given back: %v, %v", left, err)
	}
	if err := p.reap(a); err != nil { // its DEL has come meanwhile
		t.Error(err)
	}
}
