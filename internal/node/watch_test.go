// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/netns"
)

// follows runs Follow in the calling thread's namespace, and returns what tells of
// a change, and what ends it.
func follows(t *testing.T) (told <-chan struct{}, end func()) {
	t.Helper()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	return followsIn(t, ns)
}

// followsIn is follows in another namespace, which it closes. These are changed's
// first answers.
func followsIn(t *testing.T, ns *os.File, answers ...error) (told <-chan struct{}, end func()) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	tell, ended := make(chan struct{}, 100), make(chan error, 1)
	go func() {
		defer ns.Close()
		ended <- netns.DoFile(ns, func() error {
			return Follow(ctx, func() (err error) {
				if len(answers) > 0 {
					err, answers = answers[0], answers[1:]
				}
				tell <- struct{}{}
				return err
			})
		})
	}()
	return tell, func() {
		t.Helper()
		stop()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("Follow does not end")
		}
	}
}

func tells(t *testing.T, told <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-told:
	case <-time.After(10 * time.Second):
		t.Errorf("not told of %s", what)
	}
}

// Rules that others change are told of, so that an agent puts its own right.
func TestFollowTellsOfRules(t *testing.T) {
	n := newDoorNode(t)
	told, end := follows(t)
	tells(t, told, "the start")
	for _, change := range []string{"ip rule add pref 5 lookup 99", "ip -6 rule add pref 5 lookup 99", "ip rule del pref 5"} {
		n.run("%s", change)
		tells(t, told, change)
	}
	end()
}

// What failed is done again though nothing changes any more; what did not, is not.
func TestFollowTriesAgain(t *testing.T) {
	quiet, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	failed := errors.New("failed")
	told, end := followsIn(t, quiet, failed, failed)
	for _, what := range []string{"the start", "the second try", "the third"} {
		tells(t, told, what)
	}
	select {
	case <-told:
		t.Error("a fourth try after one that did not fail")
	case <-time.After(3 * retryFirst):
	}
	end()
}

// What changes at the very start is in nobody's way.
func TestFollowStartsWhileDevicesChange(t *testing.T) {
	newDoorNode(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	home, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	enough, churned := make(chan struct{}), make(chan error)
	go func() {
		churned <- netns.DoFile(home, func() error {
			for mtu := 1500; ; mtu ^= 1 {
				select {
				case <-enough:
					return nil
				default:
				}
				if err := netlink.LinkSetMTU(lo, mtu); err != nil {
					return err
				}
			}
		})
	}()
	for range 300 {
		told, end := follows(t)
		tells(t, told, "the start")
		end()
	}
	close(enough)
	if err := <-churned; err != nil {
		t.Error(err)
	}
}
