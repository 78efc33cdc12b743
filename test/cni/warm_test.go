// SPDX-License-Identifier: Apache-2.0

package cni_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// warm are nodes that tests hand on to each other: to make one, and to load the
// programs for its first pod, takes longer than most tests do.
var warm pool

type pool struct {
	free  map[string]*node
	undos []func() error
}

// lend is a node of a kind; first says that it is new. It is free again after a
// test that passed, which has shown that it left nothing. One that failed keeps it.
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
		if t.Failed() || t.Skipped() {
			return
		}
		if p.free == nil {
			p.free = make(map[string]*node)
		}
		p.free[kind] = n
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
