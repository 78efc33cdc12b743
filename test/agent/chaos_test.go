// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/mustang-net/mustang/lab"
)

// stream is traffic that must not notice anything: one connection that stays,
// and new ones one after the other.
type stream struct {
	stop   context.CancelFunc
	done   sync.WaitGroup
	asked  atomic.Int64
	slow   atomic.Int64 // new connections that took a second or more
	halts  atomic.Int64 // of this process, which cannot tell who was late then
	mu     sync.Mutex
	faults []string
}

// A new connection is to be answered within trafficPatience. A time-out that
// comes later than that by halted is this process's: it did not run, as on a
// machine that stops it to measure something. New connections are connectPause
// apart: each keeps its port for a minute, and there are 28,000.
const (
	trafficPatience = 5 * time.Second
	halted          = 300 * time.Millisecond
	connectPause    = 3 * time.Millisecond
)

// traffic starts; names are those who may answer.
func (w *world) traffic(to netip.AddrPort, names ...string) *stream {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &stream{stop: cancel}
	conn, err := w.dial("tcp", to, patience)
	must(w.t, err)
	s.done.Go(func() { s.long(ctx, conn) })
	s.done.Go(func() {
		for ctx.Err() == nil {
			start := time.Now()
			name, err := w.askWithin("tcp", to, trafficPatience)
			s.asked.Add(1)
			took := time.Since(start)
			if err == nil && took > 900*time.Millisecond {
				s.slow.Add(1) // a segment was sent again
			}
			if s.wasHalted(start, err) {
				continue
			}
			if err != nil || !slices.Contains(names, name) {
				s.fault(fmt.Sprintf("a new connection to %s: %q, %v", to, name, err))
			}
			time.Sleep(connectPause)
		}
	})
	return s
}

// wasHalted says that an error is only this process's lateness.
func (s *stream) wasHalted(start time.Time, err error) bool {
	timeout := net.Error(nil)
	halt := errors.As(err, &timeout) && timeout.Timeout() && time.Since(start) > trafficPatience+halted
	if halt {
		s.halts.Add(1)
	}
	return halt
}

func (s *stream) fault(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, time.Now().Format("15:04:05.000 ")+text)
}

// long asks on one connection, whose other end must stay the same.
func (s *stream) long(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	lines := bufio.NewReader(conn)
	first := ""
	for ctx.Err() == nil {
		start, line := time.Now(), ""
		_ = conn.SetDeadline(start.Add(trafficPatience))
		_, err := io.WriteString(conn, "hello\n")
		if err == nil {
			line, err = lines.ReadString('\n')
		}
		if s.wasHalted(start, err) { // the answer is still to come
			_ = conn.SetDeadline(time.Now().Add(trafficPatience))
			line, err = lines.ReadString('\n')
		}
		if first == "" {
			first = line
		}
		if err != nil || line != first {
			s.fault(fmt.Sprintf("the long connection: %q after %q, %v", line, first, err))
			return
		}
		s.asked.Add(1)
		time.Sleep(time.Millisecond)
	}
}

func (s *stream) end(t *testing.T) {
	t.Helper()
	s.stop()
	s.done.Wait()
	if len(s.faults) > 0 {
		t.Errorf("%d faults in %d requests; the first: %s", len(s.faults), s.asked.Load(), strings.Join(s.faults[:min(len(s.faults), 5)], "\n"))
	}
	if n := s.halts.Load(); n > 0 {
		t.Logf("this process was stopped %d times", n)
	}
	if n := s.slow.Load(); n > 0 {
		t.Logf("%d of %d requests took a second or more", n, s.asked.Load())
	}
	if s.asked.Load() == 0 {
		t.Error("there was no traffic")
	}
}

// terminating is a Service whose endpoint old terminates, and now is ready.
func (w *world) terminating(name string, old, now *lab.Pod) {
	w.t.Helper()
	slices := endpoints(name, old, now)
	for _, s := range slices {
		no, yes := false, true
		s.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
	}
	w.put(slices)
}
