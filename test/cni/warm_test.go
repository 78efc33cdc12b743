// SPDX-License-Identifier: Apache-2.0

package cni_test

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// warm are nodes that tests hand on to each other: to make one, and to load the
// programs for its first pod, takes longer than most tests do.
var warm = pool{free: map[string]*node{}}

type pool struct {
	free  map[string]*node
	undos []func() error
}

// lend is a node of a kind; first says that it is new. It is free again after a
// test that passed, which has shown that it left nothing. One that failed or was
// skipped keeps it.
func (p *pool) lend(t *testing.T, kind string) (n *node, first bool) {
	t.Helper()
	watchDescriptors(t)
	n = p.free[kind]
	delete(p.free, kind)
	if first = n == nil; first {
		dir, err := os.MkdirTemp("", "mustang-cni-node-")
		if err != nil {
			t.Fatal(err)
		}
		p.later(func() error { return os.RemoveAll(dir) })
		inner := filepath.Join(dir, "node")
		if err := os.Mkdir(inner, 0o700); err != nil {
			t.Fatal(err)
		}
		n = makeNode(t, inner, p.later)
	}
	n.t = t
	t.Cleanup(func() {
		if !t.Failed() && !t.Skipped() {
			p.free[kind] = n
		}
	})
	t.Cleanup(n.nothingOfPods)
	return n, first
}

func (p *pool) later(undo func() error) { p.undos = append(p.undos, undo) }

// remove removes all of them, in use or not.
func (p *pool) remove() error {
	var errs []error
	for _, undo := range slices.Backward(p.undos) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// eachMode runs fn on a node for each mode, which has had a pod before, with a look
// for leaks. Tests have it one after the other: each leaves it as it was.
func eachMode(t *testing.T, fn func(t *testing.T, n *node, mode string)) {
	for _, mode := range modesOnce(t) {
		t.Run(mode, func(t *testing.T) {
			n, first := warm.lend(t, mode)
			n.device(mode)
			if first {
				c := n.container()
				c.add(n.config(mode))
				c.del(n.config(mode))
			}
			before := n.traces()
			fn(t, n, mode)
			if t.Failed() {
				return
			}
			after := n.traces()
			for _, list := range []map[string]string{before, after} {
				maps.DeleteFunc(list, func(k, _ string) bool {
					return strings.HasPrefix(k, "netns ") || strings.HasPrefix(k, "mount nsfs") || strings.Contains(k, "/run/netns/") ||
						gatewayOfPool.MatchString(k)
				})
			}
			if d := cmp.Diff(before, after); d != "" {
				t.Errorf("left behind (+) or missing (-):\n%s", d)
			}
		})
	}
}

// The bridge, and the host's own child of an uplink, stay as the gateway of the
// pools that pods had: a node has few, and the next pod finds them there.
var gatewayOfPool = regexp.MustCompile(`^ip (addr: inet .* scope global|route: .* dev) (mst-br0|[mi]v-up0)( proto kernel scope link src .*)?$`)
