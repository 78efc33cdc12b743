// SPDX-License-Identifier: Apache-2.0

package cni_test

// The sentences of the spec 1.1.0 that bind a plugin, in mode chained: there the
// interface is another plugin's, on the host's end of a pair or inside the pod.

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// behind is a container whose interface another plugin has made.
type behind struct {
	*container
	first, me config
	made      answer // by the first
}

func (n *node) behind(kind string) *behind {
	n.t.Helper()
	b := &behind{container: n.container(), first: previousPlugin(n, kind)}
	b.me = n.config("chained").with("cniVersion", "1.0.0").with("name", b.first["name"]).with("masquerade", true)
	b.made = b.plugin(kind, "ADD", b.first)
	return b
}

func (b *behind) add() answer {
	b.t.Helper()
	return b.ok(b.call("ADD", b.me.prev(b.made)))
}

func (b *behind) del() {
	b.t.Helper()
	b.ok(b.call("DEL", b.me.prev(b.made)))
	b.ok(b.plugin(b.first["type"].(string), "DEL", b.first.prev(b.made)))
}

// gc keeps the containers named.
func (b *behind) gc(keep ...*behind) answer {
	b.t.Helper()
	valid := []any{}
	for _, k := range keep {
		valid = append(valid, map[string]any{"containerID": k.id, "ifname": k.ifname})
	}
	return b.exec(b.command(binary, "GC", b.me.with("cniVersion", "1.1.0").with("cni.dev/valid-attachments", valid)))
}

// eachChain is eachMode behind each plugin.
func eachChain(t *testing.T, fn func(t *testing.T, n *node, kind string)) {
	for _, kind := range []string{"ptp", "bridge", "macvlan", "ipvlan"} {
		t.Run(kind, func(t *testing.T) {
			n, first := warm.lend(t, "behind "+kind)
			if first { // what the node has with its first pod, and keeps
				b := n.behind(kind)
				if b.made.status != 0 {
					t.Skipf("this kernel: %s", b.made.stdout)
				}
				b.add()
				b.del()
			}
			before := n.pods()
			fn(t, n, kind)
			// With a namespace its devices go, when the kernel gets to it: nobody's DEL waits for that.
			for deadline := time.Now().Add(10 * time.Second); !cmp.Equal(before, n.pods()) && time.Now().Before(deadline); {
				time.Sleep(50 * time.Millisecond)
			}
			if !t.Failed() {
				n.same(before, n.pods())
			}
		})
	}
}

// pods is all that pods may have on the node, whichever pods there are.
func (n *node) pods() map[string]string {
	out := n.traces()
	for k := range out {
		if strings.HasPrefix(k, "netns ") || strings.Contains(k, "/run/netns/") {
			delete(out, k)
		}
	}
	return out
}

func TestChained_ADDMustPassPrevResultThroughAndASecondMustReturnAnError(t *testing.T) {
	eachChain(t, func(t *testing.T, n *node, kind string) {
		b := n.behind(kind)
		var want, got any
		json.Unmarshal([]byte(b.made.stdout), &want)
		json.Unmarshal([]byte(b.add().stdout), &got)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("prevResult was touched:\n%s", d)
		}
		n.refused(b.call("ADD", b.me.prev(b.made)), 101, "already")
		b.ok(b.call("CHECK", b.me.prev(b.made)))
		b.del()
	})
}

func TestChained_DELMustAcceptMultipleCallsAlsoWithoutNamespacePrevResultAndState(t *testing.T) {
	eachChain(t, func(t *testing.T, n *node, kind string) {
		b := n.behind(kind)
		b.ok(b.call("DEL", b.me)) // never added
		b.add()
		b.ok(b.call("DEL", b.me.prev(b.made)))
		b.ok(b.call("DEL", b.me))
		b.del()
		for _, lost := range []func(b *behind){
			func(b *behind) { n.forgetRecords() },
			func(b *behind) { run(t, "ip", "netns", "del", b.ns) },
		} {
			b := n.behind(kind)
			b.add()
			lost(b)
			b.ok(b.call("DEL", b.me))
			b.del()
			b.gc() // masquerading is known by the records alone
		}
	})
}

func TestChained_CHECKMustConsultPrevResultAndReturnAnErrorIfAResourceIsMissing(t *testing.T) {
	eachChain(t, func(t *testing.T, n *node, kind string) {
		for says, brk := range map[string]func(b *behind){
			"eth0 in the container is down": func(b *behind) { run(t, "ip", "-n", b.ns, "link", "set", "eth0", "down") },
			"is missing from eth0":          func(b *behind) { run(t, "ip", "-n", b.ns, "addr", "flush", "dev", "eth0") },
			"no complete record":            func(b *behind) { n.forgetRecords() },
			"endpoint":                      func(b *behind) { n.dropEndpoints() },
			"not masqueraded": func(b *behind) {
				run(t, "nsenter", "--net=/var/run/netns/"+n.name, "nft", "flush", "ruleset")
			},
		} {
			b := n.behind(kind)
			b.add()
			b.ok(b.call("CHECK", b.me.prev(b.made))) // immediately after ADD
			n.refused(b.call("CHECK", b.me), 7, "prevResult")
			brk(b)
			n.refused(b.call("CHECK", b.me.prev(b.made)), 100, says)
			b.del()
			b.gc()
		}
	})
}

func TestChained_GCRemovesExactlyWhatIsNotInValidAttachments(t *testing.T) {
	eachChain(t, func(t *testing.T, n *node, kind string) {
		all := []*behind{n.behind(kind), n.behind(kind), n.behind(kind)}
		for _, b := range all {
			b.add()
		}
		n.refused(n.exec(n.command(binary, "GC", all[0].me.with("cniVersion", "1.1.0"))), 7, "valid-attachments")
		n.ok(all[0].gc(all[0], all[2]))
		for i, b := range all {
			if gone := b.call("CHECK", b.me.prev(b.made)).status != 0; gone != (i == 1) {
				t.Errorf("container %d: gone is %v", i, gone)
			}
		}
		n.ok(all[0].gc())
		for _, b := range all {
			b.del()
		}
	})
}

func TestChained_MustHandleBeingExecutedConcurrentlyAcrossContainers(t *testing.T) {
	eachChain(t, func(t *testing.T, n *node, kind string) {
		var all []*behind
		for range 6 {
			all = append(all, n.behind(kind))
		}
		answers := make([]answer, len(all))
		for _, command := range []string{"ADD", "CHECK", "DEL"} {
			var wg sync.WaitGroup
			for i, b := range all {
				wg.Go(func() { answers[i] = b.call(command, b.me.prev(b.made)) })
			}
			wg.Wait()
			for _, a := range answers {
				n.ok(a)
			}
		}
		for _, b := range all {
			b.del()
		}
	})
}

func TestChained_STATUSMustExitWithZeroIfReadyAndNonZeroIfNot(t *testing.T) {
	n := newNode(t)
	status := func(conf config) answer { return n.exec(n.command(binary, "STATUS", conf)) }
	conf := n.config("chained")
	n.ok(status(conf))
	n.refused(status(conf.with("bpffs", "/tmp/none")), 50, "not on a bpffs")
	n.refused(status(conf.with("cgroupRoot", "/tmp")), 50, "cgroup2")
	for field, value := range map[string]any{"mtu": 1400, "uplink": "up0", "bridge": "br7", "localMTU": 9000, "ipam": map[string]any{"type": "static"}} {
		n.refused(status(conf.with(field, value)), 7, field+": has no meaning in mode chained")
	}
}

func TestChained_KilledAtAnyInstantThenDELOrGCLeavesNothing(t *testing.T) {
	eachChain(t, func(t *testing.T, n *node, kind string) {
		b := n.behind(kind)
		started := time.Now()
		b.add()
		whole := time.Since(started)
		b.ok(b.call("DEL", b.me.prev(b.made)))
		rounds := 12
		if testing.Short() {
			rounds = 4
		}
		for i := range rounds {
			n.unchangedRound(i, func() {
				if i%3 == 2 {
					b.add()
				}
				b.kill(map[bool]string{true: "DEL", false: "ADD"}[i%3 == 2], b.me.prev(b.made), rand.N(whole))
				if i%2 == 0 {
					b.ok(b.call("DEL", b.me))
				} else {
					n.ok(b.gc())
				}
			})
			if left, _ := filepath.Glob(filepath.Join(n.state(), "endpoints", "*.json")); len(left) > 0 {
				t.Fatal(fmt.Errorf("round %d: left behind: %v", i, left))
			}
		}
		b.del()
	})
}
