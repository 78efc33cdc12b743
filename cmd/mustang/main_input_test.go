// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"os"
	"testing"
	"time"
)

// A signal ends a tool that waits for standard input, and what came before is all there.
func TestStandardInputIsWaitedForUntilASignal(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	ctx, cancel := context.WithCancel(t.Context())
	in := interruptibleReader{ctx, r}
	if _, err := w.WriteString("some"); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 4)
	if _, err := io.ReadFull(in, got); err != nil || string(got) != "some" {
		t.Fatalf("%q, %v", got, err)
	}
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := io.ReadAll(in); err == nil {
		t.Error("what was cut short is taken for the whole")
	}
}

func TestAnotherDayIsTold(t *testing.T) {
	now := time.Date(2026, 11, 28, 10, 3, 0, 0, time.Local)
	for at, want := range map[time.Time]string{now.Add(-time.Minute): "10:02:00.000", now.Add(-24 * time.Hour): "2026-11-27 10:03:00.000"} {
		if got := clock(at, now); got != want {
			t.Errorf("%v: %q, want %q", at, got, want)
		}
	}
}
