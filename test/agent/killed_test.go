// SPDX-License-Identifier: Apache-2.0

package agent_test

// SIGKILL of the agent at random instants, while a thousand Services change all
// the time and are used: by connections that stay, and by new ones.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/mustang-net/mustang/lab"
)

const (
	changing  = 1000 // Services
	changers  = 4    // of them, at once
	groups    = 4    // of servers: each Service has its own, so that another's shows
	untouched = 1    // number of the Service that stays as it is
	firstIP   = 100  // number of the first that changes
	clients   = 3    // of each way of serving a pod, each opening one connection after the other
	heldMost  = 100  // connections at once that stay for a while
)

// TestKilled: no reset, no wrong backend, and after the last restart the tables
// are what Kubernetes says. MUSTANG_TEST_KILLS makes it longer.
func TestKilled(t *testing.T) {
	kills := 10
	if text := os.Getenv("MUSTANG_TEST_KILLS"); text != "" {
		var err error
		if kills, err = strconv.Atoi(text); err != nil {
			t.Fatalf("MUSTANG_TEST_KILLS: %v", err)
		}
	}
	w := newWorld(t, 2*groups)
	a, b := w.servers[0], w.servers[1]
	w.put(service("steady", untouched, nil), endpoints("steady", a, b))
	w.answersBy("tcp", at(vip4(untouched)), a, b)
	w.answersBy("tcp", at(vip6(untouched)), a, b)
	before := w.entries()

	c := &chaos{world: w, services: make([]*subject, changing)}
	began := time.Now()
	c.make()
	w.tablesAreRight()
	steady, steady6 := w.traffic(at(vip4(untouched)), a.Name, b.Name), w.traffic(at(vip6(untouched)), a.Name, b.Name)
	made := time.Now()
	end := c.start(w.pod(t.Context(), "sockets", "--service-path=both"))
	c.kill(kills)
	for limit := time.Now().Add(5 * patience); !c.enough(kills) && time.Now().Before(limit); {
		c.kill(1) // between the kills a slow machine has done too little
	}
	end()
	steady.end(t)
	steady6.end(t)
	w.tablesAreRight()
	c.report(kills)
	t.Logf("%v to make %d Services, %v of chaos and its end", made.Sub(began).Round(time.Second), changing, time.Since(made).Round(time.Second))

	c.each(func(s *subject) error { return c.tryRemove(s.name) })
	eventually(t, "what was used by Services that are gone is free again", func() error {
		if now := w.entries(); now != before {
			return fmt.Errorf("%s; before there were %s", now, before)
		}
		return nil
	})
}

// chaos is what happens while the agent is killed.
type chaos struct {
	*world
	services []*subject
	awake    clock
	caughtUp atomic.Int64 // by awake: when the last agent was started that has caught up since

	changes, answers, refusals, kept, asked, halts atomic.Int64

	held   atomic.Int64
	mu     sync.Mutex
	faults []string
}

// clock counts milliseconds in which this process runs. It stands still while
// the machine stops all of us to measure something.
type clock struct{ atomic.Int64 }

func (c *clock) run(ctx context.Context) {
	for last := time.Now(); ctx.Err() == nil; {
		time.Sleep(2 * time.Millisecond)
		now := time.Now()
		c.Add(min(now.Sub(last), 50*time.Millisecond).Milliseconds())
		last = now
	}
}

// subject is a Service that changes.
type subject struct {
	name string
	ip   int
	pods []*lab.Pod // of its group

	mu       sync.Mutex
	versions []version // the last one is what it is, or is about to be
}

// version is what a Service was to be: the names of its endpoints' pods, none
// when there was no such Service.
type version struct {
	pods  []string
	until int64 // when the API server had the next one, or never
}

const never = 1<<63 - 1

// becomes notes what a Service is about to be; done: the API server has it.
func (s *subject) becomes(pods []*lab.Pod) (done func(now int64)) {
	v := version{until: never}
	for _, p := range pods {
		v.pods = append(v.pods, p.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.versions = append(s.versions, v)
	old := len(s.versions) - 2
	return func(now int64) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if old >= 0 {
			s.versions[old].until = now
		}
	}
}

// may says whether the Service may have behaved so in a version that was not
// replaced before since.
func (s *subject) may(since int64, as func(version) bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.versions, func(v version) bool { return v.until >= since && as(v) })
}

// make makes the Services, each with one endpoint.
func (c *chaos) make() {
	c.t.Helper()
	for n := range c.services {
		g := 2 * (n % groups)
		c.services[n] = &subject{name: fmt.Sprintf("c%d", n), ip: firstIP + n, pods: c.servers[g : g+2]}
	}
	c.each(func(s *subject) error { return c.set(s, s.pods[:1]) })
}

// each does fn for all Services, several at once.
func (c *chaos) each(fn func(*subject) error) {
	c.t.Helper()
	var workers sync.WaitGroup
	for k := range 8 {
		workers.Go(func() {
			for n := k; n < len(c.services); n += 8 {
				check(c.t, fn(c.services[n]))
			}
		})
	}
	workers.Wait()
}

// set gives a Service these endpoints, or, without any, takes it away.
func (c *chaos) set(s *subject, pods []*lab.Pod) error {
	last := len(s.versions) - 1
	exists := last >= 0 && len(s.versions[last].pods) > 0
	done := s.becomes(pods)
	var err error
	switch {
	case len(pods) == 0 && exists:
		err = c.tryRemove(s.name)
	case len(pods) > 0 && !exists:
		err = c.tryPut(service(s.name, s.ip, nil), endpoints(s.name, pods...))
	case len(pods) > 0:
		err = c.tryPut(endpoints(s.name, pods...))
	}
	done(c.awake.Load())
	return err
}

// start lets Services change, and has pods use them: the client by packet,
// sockets at connect().
func (c *chaos) start(sockets *lab.Pod) (end func()) {
	ctx, stop := context.WithCancel(context.Background())
	changing, done := context.WithCancel(ctx)
	var running, changes sync.WaitGroup
	running.Go(func() { c.awake.run(ctx) })
	for k := range changers {
		changes.Go(func() { c.change(changing, rand.New(rand.NewPCG(1, uint64(k))), k) })
	}
	for k := range 2 * clients {
		from := []*lab.Pod{c.client, sockets}[k%2]
		running.Go(func() {
			check(c.t, from.Do(func() error { // one thread there for all of it
				c.use(ctx, &running, rand.New(rand.NewPCG(2, uint64(k))), from.Name)
				return nil
			}))
		})
	}
	return func() {
		done()
		changes.Wait()
		c.synced()
		stop()
		running.Wait()
	}
}

// change changes every changers-th Service, from the k-th on, until ctx ends.
func (c *chaos) change(ctx context.Context, r *rand.Rand, k int) {
	for ctx.Err() == nil {
		s := c.services[k+changers*r.IntN(len(c.services)/changers)]
		pods := [][]*lab.Pod{nil, s.pods[:1], s.pods[1:], s.pods}[r.IntN(4)]
		if err := c.set(s, pods); err != nil {
			c.fault("change %s: %v", s.name, err)
			return
		}
		c.changes.Add(1)
	}
}

// kill kills the agent at random instants: every second time soon after it has
// caught up, else whatever it is about.
func (c *chaos) kill(times int) {
	r := rand.New(rand.NewPCG(3, 4))
	started := c.awake.Load()
	for i := range times {
		if i%2 == 0 {
			c.synced()
			c.caughtUp.Store(started)
		}
		time.Sleep(time.Duration(r.IntN(1200)) * time.Millisecond)
		c.killAgent()
		started = c.awake.Load()
		c.startAgent()
	}
	c.synced()
	c.caughtUp.Store(started)
}

// use opens one connection after the other, through random Services, in the
// namespace that it runs in.
func (c *chaos) use(ctx context.Context, running *sync.WaitGroup, r *rand.Rand, from string) {
	for ctx.Err() == nil {
		s := c.services[r.IntN(len(c.services))]
		network, to := "tcp", at([]netip.Addr{vip4(s.ip), vip6(s.ip)}[r.IntN(2)])
		if r.IntN(4) == 0 {
			network = "udp"
		}
		since, start := c.caughtUp.Load(), c.awake.Load()
		deadline := time.Now().Add(trafficPatience)
		name := ""
		conn, err := net.DialTimeout(network, to.String(), trafficPatience)
		if err == nil {
			name, err = whoUntil(conn, deadline)
		}
		c.judge(s, since, start, fmt.Sprintf("%s: a new connection to %s's %s %s", from, s.name, network, to), name, err)
		if err == nil && network == "tcp" && c.held.Add(1) <= heldMost {
			life := time.Duration(r.IntN(10_000)) * time.Millisecond
			running.Go(func() {
				defer c.held.Add(-1)
				c.keep(ctx, conn, fmt.Sprintf("%s: a connection to %s's %s", from, s.name, to), name, life)
			})
			continue
		} else if err == nil && network == "tcp" {
			c.held.Add(-1)
		}
		if conn != nil {
			conn.Close()
		}
	}
}

// judge says whether a new connection met what it had to.
func (c *chaos) judge(s *subject, since, start int64, what, name string, err error) {
	switch {
	case err == nil && s.may(since, func(v version) bool { return slices.Contains(v.pods, name) }):
		c.answers.Add(1)
	case err == nil:
		c.fault("%s is answered by %s", what, name)
	case s.may(since, func(v version) bool { return len(v.pods) == 0 }):
		c.refusals.Add(1)
	case strings.Contains(what, " udp ") && errors.Is(err, unix.ECONNABORTED): // its backend left meanwhile
	case os.IsTimeout(err) && c.awake.Load()-start < trafficPatience.Milliseconds()*8/10:
		c.halts.Add(1)
	default:
		c.fault("%s: %v", what, err)
	}
}

// keep asks on a connection for a while, whatever becomes of its Service: the
// endpoints that leave it live on.
func (c *chaos) keep(ctx context.Context, conn net.Conn, what, name string, life time.Duration) {
	defer conn.Close()
	c.kept.Add(1)
	for end := time.Now().Add(life); ctx.Err() == nil && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		start := c.awake.Load()
		now, err := who(conn)
		if os.IsTimeout(err) && c.awake.Load()-start < 1500 {
			c.halts.Add(1)
			return
		}
		if err != nil || now != name {
			c.fault("%s, which %s answered before: %q, %v", what, name, now, err)
			return
		}
		c.asked.Add(1)
	}
}

func (c *chaos) fault(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults = append(c.faults, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

func (c *chaos) report(kills int) {
	c.t.Logf("%d kills, %d changes; new connections: %d answered, %d refused as they may be; %d connections kept, %d requests on them; this process was stopped %d times",
		kills, c.changes.Load(), c.answers.Load(), c.refusals.Load(), c.kept.Load(), c.asked.Load(), c.halts.Load())
	if len(c.faults) > 0 {
		c.t.Errorf("%d faults; the first:\n%s", len(c.faults), strings.Join(c.faults[:min(len(c.faults), 10)], "\n"))
	}
	if !c.enough(kills) {
		c.t.Error("that is too little to tell anything")
	}
}

// enough has happened to tell something.
func (c *chaos) enough(kills int) bool {
	return c.changes.Load() >= int64(20*kills) && c.answers.Load() >= int64(50*kills) && c.kept.Load() >= int64(kills) && c.refusals.Load() > 0
}

// tablesAreRight waits until the tables are exactly what the API's objects say,
// and asks every fourth frontend.
func (w *world) tablesAreRight() {
	w.t.Helper()
	want := w.wanted()
	eventually(w.t, "the tables are what Kubernetes says", func() error {
		list := w.services()
		for _, s := range list {
			key := s.Protocol + " " + netip.AddrPortFrom(netip.MustParseAddr(s.Service), s.Port).String()
			slices.Sort(s.Backends)
			if backends, ok := want[key]; !ok || !slices.Equal(backends, s.Backends) || s.Owner != "kubernetes" {
				return fmt.Errorf("%s of %s has %v; wanted: %v %v", key, s.Owner, s.Backends, ok, backends)
			}
		}
		if len(list) != len(want) {
			return fmt.Errorf("%d frontends; %d are wanted", len(list), len(want))
		}
		return nil
	})
	n := 0
	for key, backends := range want { // in no order
		if n++; n%4 != 0 {
			continue
		}
		network, to, _ := strings.Cut(key, " ")
		name, err := w.ask(network, netip.MustParseAddrPort(to))
		if err != nil || !slices.ContainsFunc(w.servers, func(p *lab.Pod) bool {
			return p.Name == name && (slices.Contains(backends, netip.AddrPortFrom(p.IPv4, serverPort).String()) ||
				slices.Contains(backends, netip.AddrPortFrom(p.IPv6, serverPort).String()))
		}) {
			w.t.Errorf("%s, which has %v: %q answers, %v", key, backends, name, err)
		}
	}
}

// wanted is the backends of every frontend, from the API's objects by their own
// text: each ready endpoint of each slice of the frontend's Service and family,
// at the port of the same name.
func (w *world) wanted() map[string][]string {
	w.t.Helper()
	var services corev1.ServiceList
	var list discoveryv1.EndpointSliceList
	must(w.t, w.api.Do(w.t.Context(), http.MethodGet, servicesPath, nil, &services))
	must(w.t, w.api.Do(w.t.Context(), http.MethodGet, slicesPath, nil, &list))
	out := map[string][]string{}
	for _, s := range services.Items {
		for _, ip := range s.Spec.ClusterIPs {
			for _, port := range s.Spec.Ports {
				if s.Name == "kubernetes" {
					continue // w.services leaves it out, too
				}
				family := discoveryv1.AddressTypeIPv4
				if strings.Contains(ip, ":") {
					family = discoveryv1.AddressTypeIPv6
				}
				var backends []string
				for _, slice := range list.Items {
					if slice.Labels[discoveryv1.LabelServiceName] == s.Name && slice.AddressType == family {
						backends = append(backends, backendsOf(slice, port)...)
					}
				}
				slices.Sort(backends)
				key := strings.ToLower(string(port.Protocol)) + " " + netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(port.Port)).String()
				out[key] = backends
			}
		}
	}
	return out
}

func backendsOf(slice discoveryv1.EndpointSlice, port corev1.ServicePort) (out []string) {
	for _, p := range slice.Ports {
		if *p.Name != port.Name || *p.Protocol != port.Protocol {
			continue
		}
		for _, e := range slice.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				out = append(out, netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port)).String())
			}
		}
	}
	return out
}

// entries is how full the tables of Services are, as the metrics say.
func (w *world) entries() string {
	w.t.Helper()
	_, body, err := w.get(metrics, "/metrics")
	must(w.t, err)
	var out []string
	for line := range strings.Lines(body) {
		for _, table := range []string{"mst_services", "mst_slots", "mst_backends"} {
			if strings.HasPrefix(line, `mustang_table_entries{table="`+table) {
				out = append(out, strings.TrimSpace(line))
			}
		}
	}
	if len(out) != 3 {
		w.t.Fatalf("not each table of Services is counted: %v", out)
	}
	return strings.Join(out, "; ")
}
