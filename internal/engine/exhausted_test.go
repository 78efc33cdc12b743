// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/state"
)

// Who has no file left to look with does not take a pod for gone: its programs would go.
func TestAPodIsNotGoneForWantOfAFile(t *testing.T) {
	n := newNode(t)
	if _, err := n.add(n.pod(1)); err != nil {
		t.Fatal(err)
	}
	n.must(func(e *Engine) error {
		all, err := e.Endpoints()
		if err != nil || len(all) != 1 || !e.alive(all[0]) { // all that the runtime opens itself is open
			t.Fatal(all, err)
		}
		var alive bool
		if err := withoutFiles(func() { alive = e.alive(all[0]) }); err != nil {
			return err
		}
		if !alive {
			t.Error("it is taken for gone")
		}
		gone := []state.Endpoint{all[0], all[0], all[0]}
		gone[0].Netns += "x"
		gone[1].NetnsCookie++
		gone[2].PodIndex += 100
		for _, ep := range gone {
			if e.alive(ep) {
				t.Errorf("%+v is taken for alive", ep)
			}
		}
		return nil
	})
}

// withoutFiles runs fn while this process can open none.
func withoutFiles(fn func()) (err error) {
	var had unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &had); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	fill := []int{fd}
	defer func() {
		err = errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &had))
		for _, f := range fill {
			unix.Close(f)
		}
	}()
	for {
		f, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		fill = append(fill, f)
		if f > fd {
			break
		}
	}
	none := had
	none.Cur = uint64(fill[len(fill)-1]) + 1 // all below are taken
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		return err
	}
	fn()
	return nil
}
