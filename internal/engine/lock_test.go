// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
)

// everything is what the scope has: pins, files with what is in them, filters, routes and devices.
func (n *node) everything() map[string]string {
	n.t.Helper()
	all := n.marks()
	for _, dir := range []string{n.scope.BPFFS, n.scope.StateDir} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			all[path] = ""
			if err == nil && d.Type().IsRegular() && dir == n.scope.StateDir {
				text, err := os.ReadFile(path)
				all[path] = string(text)
				return err
			}
			return err
		})
		if err != nil {
			n.t.Fatal(err)
		}
	}
	return all
}

// A command with the wrong bpffs, or the right one that was unmounted, takes over no pods: whether another mustang
// holds them, or none.
func TestAStateDirectoryBelongsToItsBPFFS(t *testing.T) {
	for attach, noTCX := range map[string]bool{"tcx": false, "clsact": true} {
		t.Run(attach, func(t *testing.T) {
			if !noTCX && !datapath.Probe().TCX {
				t.Skip("this kernel has no tcx")
			}
			n := newNode(t)
			n.opts.NoTCX = noTCX
			one := svc("10.96.0.1:80", "10.9.0.2:80")
			one.Affinity = time.Minute // so that it has a record
			if _, err := n.add(n.pod(1)); err != nil {
				t.Fatal(err)
			}
			n.must(func(e *Engine) error { return e.AddServices(one) })
			wrong := n.scope
			wrong.BPFFS += "-wrong"
			before := n.everything()
			refused := func(when string) {
				t.Helper()
				for _, opts := range []Options{{}, {NoWait: true}, {ReadOnly: true}} {
					opts.Sizes, opts.Notify = n.opts.Sizes, n.opts.Notify
					e, err := Open(context.Background(), wrong, opts)
					if err == nil {
						err = errors.Join(errors.New("it is opened"), e.Close())
					}
					n.names(when, err)
				}
				n.names(when, Reset(context.Background(), wrong, n.opts.Notify))
				n.names(when, wrong.Check())
				if after := n.everything(); !maps.Equal(after, before) {
					t.Errorf("%s: there is %v, and was %v", when, after, before)
				}
				if _, err := os.Stat(wrong.BPFFS); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: %s was made: %v", when, wrong.BPFFS, err)
				}
			}
			e := n.open()
			refused("open")
			if !n.scope.Held() || !wrong.Held() {
				t.Error("it does not look held")
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			refused("at rest")
			if wrong.Held() {
				t.Error("it looks held")
			}
			if err := Reset(context.Background(), n.scope, n.opts.Notify); err != nil {
				t.Fatal(err)
			}
			n.scope = wrong // which newNode resets, and looks for what is left
			if _, err := n.add(n.pod(2)); err != nil {
				t.Error(err)
			}
		})
	}
}

// names wants a refusal that names the scope's bpffs.
func (n *node) names(when string, err error) {
	n.t.Helper()
	if want := fmt.Sprintf("%s is the state directory of %s, whose tables are at work; give --bpffs %[2]s", n.scope.StateDir, n.scope.BPFFS); err == nil || !strings.Contains(err.Error(), want) {
		n.t.Errorf("%s: %v; want %q", when, err, want)
	}
}

// Also while its bpffs is unmounted, a scope that somebody works on is nobody else's.
func TestAScopeIsHeldWithoutItsBPFFS(t *testing.T) {
	n := newNode(t)
	n.opts.NoTCX = true
	if _, err := n.add(n.pod(1)); err != nil {
		t.Fatal(err)
	}
	e := n.open()
	if err := datapath.Remove(n.scope.BPFFS); err != nil { // as far as others can see
		t.Fatal(err)
	}
	before := n.marks()
	other := n.scope
	other.BPFFS += "-other"
	for _, scope := range []Scope{n.scope, other} {
		if !scope.Held() {
			t.Errorf("%s does not look held", scope.BPFFS)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		if err := Reset(ctx, scope, n.opts.Notify); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), scope.StateDir) {
			t.Errorf("reset: %v", err)
		}
		cancel()
		if _, err := Open(context.Background(), scope, Options{NoWait: true, Notify: n.opts.Notify}); !errors.Is(err, ErrBusy) {
			t.Errorf("open: %v", err)
		}
	}
	if after := n.marks(); !maps.Equal(after, before) {
		t.Errorf("there is %v, and was %v", after, before)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// What another bpffs held and holds no more, as after a reboot, is nobody's; and a state directory of an earlier version
// is its who comes first.
func TestAStateDirectoryWhoseBPFFSIsGoneIsTaken(t *testing.T) {
	n := newNode(t)
	if _, err := n.add(n.pod(1)); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(n.scope.StateDir, "scope.lock")
	remembered := func() {
		t.Helper()
		if text, err := os.ReadFile(file); err != nil || string(text) != n.scope.BPFFS {
			t.Errorf("remembered is %q, %v", text, err)
		}
	}
	remembered()
	if err := datapath.Remove(n.scope.BPFFS); err != nil {
		t.Fatal(err)
	}
	n.scope.BPFFS += "-a-longer-name"
	if got := n.endpoints(); len(got) != 1 {
		t.Errorf("%+v", got)
	}
	remembered()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	n.endpoints()
	remembered()
	link := filepath.Join(t.TempDir(), "link") // the same by another name
	if err := os.Symlink(n.scope.BPFFS, link); err != nil {
		t.Fatal(err)
	}
	if err := (Scope{BPFFS: link, StateDir: n.scope.StateDir}).Check(); err != nil {
		t.Error(err)
	}
}
