// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/engine"
)

// A request of any length is waited for: the newline behind it may be read by itself.
func TestARequestOfAnyLengthIsAnswered(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	s := Server{Engine: func(ctx context.Context, _ func(*engine.Engine) error) error {
		time.Sleep(50 * time.Millisecond) // it has other things to do
		return ctx.Err()
	}}
	go func() { served <- s.Serve(ctx, l) }()
	for _, length := range []int{1000, 16383, 16384, 16385, 100_000} {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		text := `{"op":"status","deadline":"` + time.Now().Add(time.Minute).UTC().Format(time.RFC3339) + `","key":"`
		text += strings.Repeat("x", length-len(text)-2) + `"}`
		if _, err := conn.Write([]byte(text + "\n")); err != nil {
			t.Fatal(err)
		}
		var answer response
		if err := json.NewDecoder(conn).Decode(&answer); err != nil || answer.Error != "" {
			t.Errorf("%d bytes: %v %s", length, err, answer.Error)
		}
		conn.Close()
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
