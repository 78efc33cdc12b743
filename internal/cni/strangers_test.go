// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/engine"
)

// stranger is another network's pod, on the node at or elsewhere, with an address of the pool's.
func (w *world) stranger(at, letter, addr string) (name string) {
	w.t.Helper()
	name = w.node + "-s" + letter
	w.ip("netns", "add", name)
	w.t.Cleanup(func() {
		if _, err := os.Stat("/var/run/netns/" + name); err == nil {
			w.ip("netns", "del", name)
		}
	})
	w.ip("-n", at, "link", "add", "other-"+letter, "type", "veth", "peer", "name", "eth0", "netns", name)
	w.ip("-n", name, "addr", "add", addr, "dev", "eth0")
	return name
}

// small is a pool of the addresses 2 to 6.
func small() map[string]any {
	return map[string]any{"ipam": map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/29"}}}
}

// given is the address that an ADD was answered.
func (w *world) given() string {
	w.t.Helper()
	var r struct {
		IPs []struct{ Address string } `json:"ips"`
	}
	if err := json.Unmarshal(w.said, &r); err != nil || len(r.IPs) != 1 {
		w.t.Fatalf("%s: %v", w.said, err)
	}
	return r.IPs[0].Address
}

// Pods that run beside mustang may have addresses of its pools: nobody gets those while they are there, with an agent and
// without. Another node's on this machine, and addresses that are none of the pool's, are nothing to it.
func TestAnAddressThatAPodHasIsNotGiven(t *testing.T) {
	for _, agent := range []bool{false, true} {
		t.Run(fmt.Sprintf("agent=%v", agent), func(t *testing.T) {
			w := newWorld(t)
			other := w.node + "-other"
			w.ip("netns", "add", other)
			t.Cleanup(func() { w.ip("netns", "del", other) })
			first := w.stranger(w.node, "a", "10.9.0.2/16")
			w.stranger(w.node, "b", "10.9.0.4/16")
			w.stranger(w.node, "c", "10.9.1.5/16")
			w.stranger(other, "d", "10.9.0.3/16")
			if agent {
				w.agent("serves")
			}
			got := func(want string) {
				t.Helper()
				w.ok(w.call("ADD", small(), podArgs...))
				if addr := w.given(); addr != want+"/32" {
					t.Errorf("it was given %s, want %s", addr, want)
				}
				w.ok(w.call("DEL", small()))
			}
			for _, want := range []string{"10.9.0.3", "10.9.0.5", "10.9.0.6", "10.9.0.3"} {
				got(want)
			}
			asked := small()
			asked["runtimeConfig"] = map[string]any{"ips": []string{"10.9.0.2"}}
			if e := w.call("ADD", asked, podArgs...); e == nil || e.Code != errExhausted || !strings.Contains(e.Msg, first) {
				t.Errorf("an address that %s has was asked for: %v", first, e)
			}
			w.ip("netns", "del", first)
			w.ok(w.call("ADD", asked, podArgs...)) // it is nobody's any more
			w.ok(w.call("DEL", asked))
		})
	}
}

// Who comes later is seen when somebody says so, as whoever puts a list in place does. A full pool has room again when a
// stranger goes.
func TestStrangersThatComeAndGo(t *testing.T) {
	w := newWorld(t)
	w.ok(w.call("ADD", small(), podArgs...))
	if addr := w.given(); addr != "10.9.0.2/32" {
		t.Errorf("the first was given %s", addr)
	}
	w.ok(w.call("DEL", small()))
	var last string
	for i, letter := range []string{"a", "b", "c", "d", "e"} {
		last = w.stranger(w.node, letter, fmt.Sprintf("10.9.0.%d/16", 2+i))
	}
	if err := LookAgain(engine.Scope{StateDir: w.state()}); err != nil {
		t.Fatal(err)
	}
	if e := w.call("ADD", small(), podArgs...); e == nil || e.Code != errExhausted {
		t.Errorf("strangers have all addresses: %v", e)
	}
	w.saysAtOnce(small(), "no address is free")
	w.ip("netns", "del", last)
	w.ok(w.call("STATUS", small()))
	w.ok(w.call("ADD", small(), podArgs...))
	if addr := w.given(); addr != "10.9.0.6/32" {
		t.Errorf("it was given %s", addr)
	}
	w.ok(w.call("DEL", small()))
}

// Pods go on without the state directory, and their addresses with them.
func TestAddressesOutliveTheStateDirectory(t *testing.T) {
	w := newWorld(t)
	w.ok(w.call("ADD", small(), podArgs...))
	if err := os.RemoveAll(filepath.Join(w.state(), "cni")); err != nil {
		t.Fatal(err)
	}
	first := w.container
	w.container = w.node + "-c2"
	w.ip("netns", "add", w.container)
	t.Cleanup(func() { w.ip("netns", "del", w.container) })
	w.id = "c2"
	w.ok(w.call("ADD", small(), podArgs...))
	if addr := w.given(); addr == "10.9.0.2/32" {
		t.Errorf("it was given %s, which %s has", addr, first)
	}
	w.ok(w.call("DEL", small()))
}
