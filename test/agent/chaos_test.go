// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/mustang-net/mustang/lab"
)

// stream is traffic that must not notice anything: one connection that stays,
// and new ones one after the other.
type stream struct {
	stop   context.CancelFunc
	done   sync.WaitGroup
	asked  atomic.Int64
	mute   atomic.Int64 // new connections that nobody answered in five seconds
	slow   atomic.Int64 // new connections that took a second or more
	mu     sync.Mutex
	faults []string
}

// traffic starts; names are those who may answer.
func (w *world) traffic(to netip.AddrPort, names ...string) *stream {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &stream{stop: cancel}
	conn, err := w.dial("tcp", to, 2*time.Second)
	must(w.t, err)
	s.done.Go(func() { s.long(ctx, conn) })
	s.done.Go(func() {
		for ctx.Err() == nil {
			start := time.Now()
			name, err := w.askWithin("tcp", to, 5*time.Second)
			s.asked.Add(1)
			if took := time.Since(start); err == nil && took > 900*time.Millisecond {
				s.slow.Add(1) // a segment was sent again
			}
			if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
				s.mute.Add(1)
				continue
			}
			if err != nil || !slices.Contains(names, name) {
				s.fault(fmt.Sprintf("a new connection to %s: %q, %v", to, name, err))
			}
		}
	})
	return s
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
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		_, err := io.WriteString(conn, "hello\n")
		var line string
		if err == nil {
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
	// About one in 8,000 new connections gets no answer, also while nothing
	// changes and no drop is counted. That is not understood yet; more is a fault.
	if n := s.mute.Load(); n > 0 {
		t.Logf("%d of %d requests got no answer", n, s.asked.Load())
		if n > 2+s.asked.Load()/2000 {
			t.Error("those are too many")
		}
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

// Of the Services that change, each pair has its own backend, so that a wrong
// one shows.
const (
	changing  = 1000
	firstIP   = 100
	kills     = 6
	untouched = 1
)

// testKilled: SIGKILL at random times under changing Services with traffic. No
// reset, no wrong backend, and after the last restart the tables are what
// Kubernetes says.
func (w *world) testKilled() {
	a, b := w.servers[0], w.servers[1]
	w.put(service("steady", untouched, nil), endpoints("steady", a, b))
	w.answersBy("tcp", at(vip4(untouched)), a, b)
	w.answersBy("tcp", at(vip6(untouched)), a, b)
	steady := w.traffic(at(vip4(untouched)), a.Name, b.Name)
	steady6 := w.traffic(at(vip6(untouched)), a.Name, b.Name)

	want := w.makeMany()
	ctx, stop := context.WithCancel(context.Background())
	var changes sync.WaitGroup
	var changed atomic.Int64
	changes.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		for ctx.Err() == nil {
			n := r.IntN(changing)
			if err := w.change(want, fmt.Sprintf("c%d", n), firstIP+n, r); err != nil {
				w.t.Error(err)
				return
			}
			changed.Add(1)
		}
	})
	r := rand.New(rand.NewPCG(3, 4))
	for range kills {
		time.Sleep(time.Duration(200+r.IntN(1500)) * time.Millisecond)
		w.killAgent()
		w.startAgent()
	}
	w.synced()
	stop()
	changes.Wait()
	w.equal(want, map[string][]*lab.Pod{"steady": {a, b}})
	steady.end(w.t)
	steady6.end(w.t)
	w.t.Logf("%d changes, %d kills, %d requests of the steady traffic", changed.Load(), kills, steady.asked.Load()+steady6.asked.Load())
}

// makeMany makes the Services that are to change, each with one endpoint.
func (w *world) makeMany() map[string][]*lab.Pod {
	w.t.Helper()
	want := map[string][]*lab.Pod{} // Service → its endpoints; absent: there is none
	names := make(chan int)
	var makers sync.WaitGroup
	for range 8 {
		makers.Go(func() {
			for n := range names {
				name := fmt.Sprintf("c%d", n)
				check(w.t, w.tryPut(service(name, firstIP+n, nil), endpoints(name, w.servers[n%2])))
			}
		})
	}
	for n := range changing {
		want[fmt.Sprintf("c%d", n)] = []*lab.Pod{w.servers[n%2]}
		names <- n
	}
	close(names)
	makers.Wait()
	return want
}

// change makes, changes or removes one Service.
func (w *world) change(want map[string][]*lab.Pod, name string, ip int, r *rand.Rand) error {
	if want[name] != nil && r.IntN(4) == 0 {
		w.remove(name)
		delete(want, name)
		return nil
	}
	pods := [][]*lab.Pod{{w.servers[0]}, {w.servers[1]}, w.servers}[r.IntN(3)]
	if want[name] == nil {
		if err := w.tryPut(service(name, ip, func(s *corev1.Service) {})); err != nil {
			return err
		}
	}
	want[name] = pods
	return w.tryPut(endpoints(name, pods...))
}

// equal waits until the tables are exactly what is wanted, and says so of every
// Service by a connection, too.
func (w *world) equal(wants ...map[string][]*lab.Pod) {
	w.t.Helper()
	expected := map[string][]string{} // protocol address:port → backends
	number := func(name string) int {
		n := untouched
		if _, err := fmt.Sscanf(name, "c%d", &n); err == nil {
			n += firstIP
		}
		return n
	}
	for _, want := range wants {
		for name, pods := range want {
			for _, vip := range []netip.Addr{vip4(number(name)), vip6(number(name))} {
				var backends []string
				for _, p := range pods {
					addr := p.IPv4
					if vip.Is6() {
						addr = p.IPv6
					}
					backends = append(backends, netip.AddrPortFrom(addr, serverPort).String())
				}
				slices.Sort(backends)
				for _, protocol := range []string{"tcp", "udp"} {
					expected[protocol+" "+at(vip).String()] = backends
				}
			}
		}
	}
	eventually(w.t, "the tables are what Kubernetes says", func() error {
		got := map[string]bool{}
		for _, s := range w.services() {
			if s.Owner != "kubernetes" {
				continue
			}
			key := s.Protocol + " " + netip.AddrPortFrom(netip.MustParseAddr(s.Service), s.Port).String()
			slices.Sort(s.Backends)
			if want, ok := expected[key]; !ok || !slices.Equal(want, s.Backends) {
				return fmt.Errorf("%s has %v; wanted: %v %v", key, s.Backends, ok, want)
			}
			got[key] = true
		}
		if len(got) != len(expected) {
			return fmt.Errorf("%d frontends; %d are wanted", len(got), len(expected))
		}
		return nil
	})
	for _, want := range wants {
		for name, pods := range want {
			name4, err := w.ask("tcp", at(vip4(number(name))))
			if err != nil || !slices.ContainsFunc(pods, func(p *lab.Pod) bool { return p.Name == name4 }) {
				w.t.Errorf("Service %s: %q answers, %v", name, name4, err)
			}
		}
	}
}
