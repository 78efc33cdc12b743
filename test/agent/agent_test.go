// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

func TestAgent(t *testing.T) {
	w := newWorld(t, 2)
	w.synced()
	for _, c := range []struct {
		name string
		run  func(*world)
	}{
		{"a Service and its changes reach packets", (*world).testChanges},
		{"the command line asks the agent", (*world).testTool},
		{"wrong objects are named and stop no other", (*world).testWrong},
		{"a health check port counts local endpoints", (*world).testHealthCheck},
		{"health and metrics", (*world).testHealth},
		{"the API server goes and comes back", (*world).testOutage},
		{"a restart keeps what is wanted and removes what is not", (*world).testRestart},
	} {
		t.Run(c.name, func(t *testing.T) {
			sub := *w
			sub.t = t
			c.run(&sub)
			if t.Failed() {
				out, _, _ := sub.mustang("", "status")
				_, drops, _ := strings.Cut(out, "DROPPED")
				t.Logf("dropped so far: %s", drops)
			}
		})
	}
}

func (w *world) testChanges() {
	a, b := w.servers[0], w.servers[1]
	w.put(service("web", 1, nil))
	eventually(w.t, "a Service without endpoints refuses", func() error {
		_, err := w.ask("tcp", at(vip4(1)))
		if !errors.Is(err, unix.ECONNREFUSED) {
			return fmt.Errorf("the answer is %v", err)
		}
		return nil
	})
	w.put(endpoints("web", a))
	for _, network := range []string{"tcp", "udp"} {
		w.answersBy(network, at(vip4(1)), a)
		w.answersBy(network, at(vip6(1)), a)
	}
	w.put(endpoints("web", a, b))
	w.answersBy("tcp", at(vip4(1)), a, b)
	w.answersBy("tcp", at(vip6(1)), a, b)

	// A terminating endpoint takes nothing new and keeps what it has.
	w.put(endpoints("web", b))
	w.answersBy("tcp", at(vip4(1)), b)
	conn, err := w.dial("tcp", at(vip4(1)), patience)
	must(w.t, err)
	defer conn.Close()
	w.terminating("web", b, a)
	w.answersBy("tcp", at(vip4(1)), a)
	if name, err := whoUntil(conn, time.Now().Add(patience)); name != b.Name {
		w.t.Errorf("the connection to a terminating endpoint: %q, %v", name, err)
	}
	// One whose Service lets go of it while its pod drains keeps what it has.
	w.drain("drains", b)
	w.put(endpoints("web", a))
	w.put(service("later", 2, nil), endpoints("later", a))
	w.answersBy("tcp", at(vip4(2)), a)
	if name, err := whoUntil(conn, time.Now().Add(patience)); name != b.Name {
		w.t.Errorf("the connection to a pod that drains and is in no slice: %q, %v", name, err)
	}
	w.remove("later")
	// One that was terminating and is in no slice any more, nor a pod, is gone.
	w.drained("drains")
	eventually(w.t, "the connection to an endpoint that is gone is reset", func() error {
		_, err := who(conn)
		if !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNABORTED) {
			return fmt.Errorf("it ends by %v", err)
		}
		return nil
	})
	w.remove("web")
	eventually(w.t, "nothing is left", func() error {
		if list := w.services(); len(list) != 0 {
			return fmt.Errorf("%d are", len(list))
		}
		return nil
	})
}

// testTool: the same requests and sentences as without an agent.
func (w *world) testTool() {
	a := w.servers[0]
	backend := netip.AddrPortFrom(a.IPv4, serverPort).String()
	own := at(vip4(900))
	for _, c := range []struct {
		args, stdin string
		code        int
		says        string
	}{
		{args: "svc add --service " + own.String() + " --backend " + backend + " --protocol tcp"},
		{args: "svc add --service " + own.String() + " --backend " + backend + " --protocol tcp", code: 1, says: "exists already"},
		{args: "svc add --service nonsense", code: 2, says: "has no port"},
		{args: "svc apply -f -", stdin: "[{service: '" + at(vip4(901)).String() + "', protocol: tcp, backends: ['" + backend + "']}]"},
		{args: "svc apply -f /nowhere", code: 2, says: "/nowhere"},
		{args: "ep ls"}, {args: "status"},
		{args: "svc frobnicate --yes", code: 2},
		{args: "node sync"}, {args: "node sync --follow", code: 1, says: "the agent of this node follows its devices by itself"},
	} {
		_, errs, code := w.mustang(c.stdin, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(errs, c.says) {
			w.t.Errorf("mustang %s: status %d, %q; want %d with %q", c.args, code, errs, c.code, c.says)
		}
	}
	w.answersBy("tcp", own, a)
	w.answersBy("tcp", at(vip4(901)), a)
	w.put(service("theirs", 902, nil), endpoints("theirs", a))
	w.answersBy("tcp", at(vip4(902)), a)
	for _, s := range w.services() {
		if want := map[string]string{vip4(900).String(): "cli", vip4(901).String(): "cli"}[s.Service]; want == "" && s.Owner != "kubernetes" || want != "" && s.Owner != want {
			w.t.Errorf("%s belongs to %s", s.Service, s.Owner)
		}
	}
	w.remove("theirs")
	if _, errs, code := w.mustang("", "svc", "rm", "--service", at(vip4(901)).String()); code != 0 {
		w.t.Error(errs)
	}
}

func (w *world) testWrong() {
	a, b := w.servers[0], w.servers[1]
	shared := "198.51.100.7"
	external := func(s *corev1.Service) { s.Spec.ExternalIPs = []string{shared} }
	w.put(service("first", 10, external), endpoints("first", a))
	w.answersBy("tcp", netip.MustParseAddrPort(shared+":80"), a)
	w.put(service("second", 11, external), endpoints("second", b))
	w.answersBy("tcp", at(vip4(11)), b) // the rest of it is in force
	w.answersBy("tcp", netip.MustParseAddrPort(shared+":80"), a)
	w.named("second", "belongs to kubernetes's Service default/first")
	w.remove("first") // the next in line has it
	w.answersBy("tcp", netip.MustParseAddrPort(shared+":80"), b)
	w.unnamed("second")
	w.remove("second")

	w.put(service("sctp", 12, func(s *corev1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "s", Port: 9, Protocol: corev1.ProtocolSCTP})
	}), endpoints("sctp", a))
	w.answersBy("tcp", at(vip4(12)), a)
	w.unnamed("sctp")
	if out, errs, code := w.mustang("", "svc", "ls"); code != 0 || !strings.Contains(out, "sctp") {
		w.t.Errorf("%s%s", out, errs)
	}
	w.remove("sctp")
}

// named waits until a problem is in /healthz, in the metrics, and in an event.
func (w *world) named(service, sentence string) {
	w.t.Helper()
	eventually(w.t, "the problem of "+service+" is told everywhere", func() error {
		code, body, err := w.get(health, "/healthz")
		if err != nil || code != http.StatusOK || !strings.Contains(body, sentence) {
			return fmt.Errorf("/healthz: %d %s %v", code, body, err)
		}
		if _, body, err = w.get(metrics, "/metrics"); err != nil || !strings.Contains(body, `mustang_service_problem{namespace="default",service="`+service+`"} 1`) {
			return fmt.Errorf("/metrics: %v", err)
		}
		var events corev1.EventList
		if err := w.api.Do(w.t.Context(), http.MethodGet, "/api/v1/namespaces/default/events", nil, &events); err != nil {
			return err
		}
		if !slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Name == service && strings.Contains(e.Message, sentence)
		}) {
			return fmt.Errorf("no event; there are %d", len(events.Items))
		}
		return nil
	})
}

func (w *world) unnamed(service string) {
	w.t.Helper()
	eventually(w.t, service+" has no problem any more", func() error {
		_, body, err := w.get(health, "/healthz")
		if strings.Contains(body, "Service default/"+service) {
			return errors.New(body)
		}
		return err
	})
}

func (w *world) testHealthCheck() {
	const port = 32111
	w.put(service("lb", 20, func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = port
	}), endpoints("lb", w.servers...))
	address := fmt.Sprintf("127.0.0.1:%d", port)
	expect := func(code, local int) {
		w.t.Helper()
		eventually(w.t, fmt.Sprintf("the check answers %d with %d endpoints", code, local), func() error {
			got, body, err := w.get(address, "/")
			if err != nil {
				return err
			}
			var answer struct {
				Service        struct{ Namespace, Name string }
				LocalEndpoints int
			}
			must(w.t, json.Unmarshal([]byte(body), &answer))
			if got != code || answer.LocalEndpoints != local || answer.Service.Name != "lb" {
				return fmt.Errorf("%d %s", got, body)
			}
			return nil
		})
	}
	expect(http.StatusOK, 2)
	w.put(endpoints("lb"))
	expect(http.StatusServiceUnavailable, 0)
	w.remove("lb")
	eventually(w.t, "nobody listens any more", func() error {
		if _, _, err := w.get(address, "/"); !errors.Is(err, unix.ECONNREFUSED) {
			return fmt.Errorf("the answer is %v", err)
		}
		return nil
	})
}

func (w *world) testHealth() {
	for _, path := range []string{"/healthz", "/readyz", "/livez"} {
		if code, body, err := w.get(health, path); code != http.StatusOK || !strings.Contains(body, "lastUpdated") {
			w.t.Errorf("%s: %d %s %v", path, code, body, err)
		}
	}
	_, body, err := w.get(metrics, "/metrics")
	must(w.t, err)
	for _, name := range []string{
		"kubeproxy_sync_proxy_rules_duration_seconds_count", "kubeproxy_network_programming_duration_seconds_count",
		"kubeproxy_sync_proxy_rules_last_timestamp_seconds", `kubeproxy_proxy_healthz_total{code="200"}`,
		"mustang_table_entries{table=", "mustang_table_memory_bytes{table=", "mustang_sync_age_seconds 0", "mustang_synced 1",
		"process_resident_memory_bytes", "go_memstats_heap_inuse_bytes",
	} {
		if !strings.Contains(body, name) {
			w.t.Errorf("no %s in /metrics", name)
		}
	}
}

func (w *world) testOutage() {
	a, b := w.servers[0], w.servers[1]
	w.put(service("web", 1, nil), endpoints("web", a))
	w.answersBy("tcp", at(vip4(1)), a)
	conn, err := w.dial("tcp", at(vip4(1)), patience)
	must(w.t, err)
	defer conn.Close()
	watch := w.traffic(at(vip4(1)), a.Name, b.Name)
	w.api.Kill()
	eventually(w.t, "the agent notices", func() error {
		_, body, err := w.get(metrics, "/metrics")
		if err == nil && strings.Contains(body, "mustang_sync_age_seconds 0\n") {
			err = errors.New("it does not")
		}
		return err
	})
	if code, body, err := w.get(health, "/healthz"); code != http.StatusOK {
		w.t.Errorf("/healthz without an API server: %d %s %v", code, body, err)
	}
	w.answersBy("tcp", at(vip4(1)), a)
	must(w.t, w.api.Start(w.t.Context()))
	w.put(endpoints("web", b))
	w.answersBy("tcp", at(vip4(1)), b)
	if name, err := whoUntil(conn, time.Now().Add(patience)); name != a.Name {
		w.t.Errorf("the connection from before: %q, %v", name, err)
	}
	watch.end(w.t)
	w.remove("web")
}

func (w *world) testRestart() {
	a, b := w.servers[0], w.servers[1]
	w.put(service("stays", 1, nil), endpoints("stays", a), service("goes", 2, nil), endpoints("goes", a))
	w.answersBy("tcp", at(vip4(1)), a)
	w.answersBy("tcp", at(vip4(2)), a)
	watch := w.traffic(at(vip4(1)), a.Name, b.Name)
	w.killAgent()
	w.answersBy("tcp", at(vip4(2)), a)
	w.remove("goes")
	w.put(endpoints("stays", b), service("comes", 3, nil), endpoints("comes", b))
	// Without an API server there is no first full sync, so nothing is removed.
	w.api.Kill()
	w.startAgent()
	eventually(w.t, "the agent lives without an API server", func() error {
		code, body, err := w.get(health, "/livez")
		if code != http.StatusOK {
			err = errors.Join(err, errors.New(body))
		}
		return err
	})
	if code, _, _ := w.get(health, "/healthz"); code != http.StatusServiceUnavailable {
		w.t.Errorf("/healthz is %d before the first full sync", code)
	}
	w.answersBy("tcp", at(vip4(1)), a)
	w.answersBy("tcp", at(vip4(2)), a)
	must(w.t, w.api.Start(w.t.Context()))
	w.answersBy("tcp", at(vip4(1)), b)
	w.answersBy("tcp", at(vip4(3)), b)
	w.answersBy("tcp", at(vip4(900)), a) // the command line's own
	eventually(w.t, "what went is removed", func() error {
		for _, s := range w.services() {
			if s.Service == vip4(2).String() {
				return fmt.Errorf("%s is there", s.Service)
			}
		}
		return nil
	})
	watch.end(w.t)
	w.remove("stays", "comes")
}
