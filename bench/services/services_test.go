// SPDX-License-Identifier: Apache-2.0

package services

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Nobody is waited for who has ended, and not when the run has been cut short.
func TestNobodyIsWaitedForInVain(t *testing.T) {
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 3)
	wait := func(ctx context.Context, pid int) {
		b := &bench{name: "it", pid: pid, start: time.Now(), patience: time.Hour}
		ended <- b.untilHealthy(ctx, func() bool { return false })
	}
	after := func(what string) (err error) {
		t.Helper()
		select {
		case err = <-ended:
		case <-time.After(time.Minute):
			t.Fatalf("still waiting: %s", what)
		}
		return err
	}
	go wait(t.Context(), dead.ProcessState.Pid())
	if err := after("it has ended"); err == nil || !strings.Contains(err.Error(), "it has ended") {
		t.Error(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	go wait(ctx, os.Getpid())
	if err := after("the run was cut short"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	w := &watcher{done: make(chan struct{})}
	close(w.done)
	go func() { _, err := w.told(make(chan float64)); ended <- err }()
	if err := after("the watch has ended"); err == nil {
		t.Error("a watch that has ended told something")
	}
}
