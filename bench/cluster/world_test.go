// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/bench/report"
)

// Whoever else reaches an agent's port starts nothing there.
func TestAgentsAnswerWhoKnowsTheirSecret(t *testing.T) {
	if err := Serve(t.Context(), "127.0.0.1:0", "", nil); err == nil {
		t.Error("an agent without a secret serves")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, addr, "secret", []string{"echo", "ready"}) }()
	status := func(method, path string) int {
		r, _ := http.NewRequest(method, "http://"+addr+path, strings.NewReader(`[]`))
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			answer, err := http.DefaultClient.Do(r)
			if err == nil {
				answer.Body.Close()
				return answer.StatusCode
			}
			if time.Now().After(end) {
				t.Fatal(err)
			}
		}
	}
	for path, want := range map[string]int{"/secret/ready": 200, "/ready": 404, "/load": 404, "/other/load": 404, "/secret/load/9/line": 404} {
		method := map[bool]string{true: http.MethodGet, false: http.MethodPost}[strings.HasSuffix(path, "ready")]
		if got := status(method, path); got != want {
			t.Errorf("%s: status %d, want %d", path, got, want)
		}
	}
	w := &world{namespace: "b", secret: "secret"}
	if pod := fmt.Sprint(w.pod(member{name: client})); !strings.Contains(pod, SecretVariable) || !strings.HasSuffix(w.agent(&member{name: client}), "/secret") {
		t.Errorf("%s; the agent is asked at %s", pod, w.agent(&member{name: client}))
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestTheReportSaysWhichFamilyItIsOf(t *testing.T) {
	for ip, want := range map[string]string{"10.1.0.2": "IPv4", "fd00::2": "IPv6"} {
		w := &world{o: Defaults(), members: map[string]*member{client: {ip: netip.MustParseAddr(ip)}}}
		var out, page bytes.Buffer
		d := &report.Document{Settings: w.settings()}
		d.Render(&out, false)
		if err := d.WriteHTML(&page); err != nil || !strings.Contains(page.String(), "<dt>CPU time</dt><dd>not measured</dd>") {
			t.Errorf("%v: the page does not say that CPU time is not measured", err)
		}
		if s := out.String(); !strings.Contains(s, ", "+want+", ") || !strings.Contains(s, ", CPU time not measured, ") {
			t.Errorf("%s:\n%s", ip, s)
		}
	}
}

// A pod waits for its namespace's service account, and for nothing else.
func TestAPodWaitsForTheServiceAccount(t *testing.T) {
	answers := []struct {
		code int
		text string
	}{
		{403, `{"message": "pods \"client\" is forbidden: error looking up service account b/default: serviceaccount \"default\" not found"}`},
		{201, `{}`},
		{403, `{"message": "pods \"client\" is forbidden: violates PodSecurity"}`},
	}
	asked := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(answers[asked].code)
		w.Write([]byte(answers[asked].text))
		asked++
	}))
	defer s.Close()
	w := &world{api: &api{s.URL, s.Client()}, namespace: "b"}
	if err := w.make(t.Context(), member{name: client}); err != nil || asked != 2 {
		t.Errorf("asked %d times: %v", asked, err)
	}
	if err := w.make(t.Context(), member{name: client}); err == nil || !strings.Contains(err.Error(), "PodSecurity") || asked != 3 {
		t.Errorf("asked %d times: %v", asked, err)
	}
}

// Whoever interrupts while the namespace is being made, or whose answer is lost, leaves none; one that
// was refused is not removed.
func TestTheNamespaceIsRemovedWhateverWasHeardOfIt(t *testing.T) {
	for _, c := range []struct {
		name    string
		answer  int
		removed bool
	}{{"made", http.StatusCreated, false}, {"refused", http.StatusConflict, false}, {"lost", http.StatusInternalServerError, true}} {
		t.Run(c.name, func(t *testing.T) {
			ctx, interrupt := context.WithCancel(t.Context())
			var made, removed string
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodDelete {
					removed = path.Base(r.URL.Path)
					w.WriteHeader(http.StatusNotFound)
					return
				}
				var body struct{ Metadata struct{ Name string } }
				if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
					t.Error(err)
				}
				made = body.Metadata.Name
				interrupt()
				w.WriteHeader(c.answer)
				w.Write([]byte("{}"))
			}))
			defer s.Close()
			w := &world{api: &api{s.URL, s.Client()}}
			if err := w.makeNamespace(ctx); (err == nil) != (c.answer == http.StatusCreated) {
				t.Error(err)
			}
			if made == "" || made != w.namespace || (removed != "") != c.removed || (c.removed && removed != made) {
				t.Errorf("made %q, known %q, removed %q", made, w.namespace, removed)
			}
		})
	}
}

// A run that is killed leaves no pod for ever.
func TestPodsEndByThemselves(t *testing.T) {
	for _, c := range []struct {
		o    Options
		more time.Duration
	}{{Defaults(), 20 * time.Minute}, {Options{Budget: 10 * time.Hour}, 10 * time.Hour}, {Options{Rounds: 1000, Duration: time.Second}, 5 * time.Hour}} {
		w := &world{o: c.o}
		got, _ := w.pod(member{name: client})["spec"].(object)["activeDeadlineSeconds"].(int64)
		if got := time.Duration(got) * time.Second; got <= c.more || got > c.more+100*time.Hour {
			t.Errorf("%+v: pods end after %v, a run takes up to %v", c.o, got, c.more)
		}
	}
}

func TestCloseSaysWhatIsLeft(t *testing.T) {
	closeWithin = 50 * time.Millisecond
	defer func() { closeWithin = 30 * time.Second }()
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer s.Close()
	w := &world{api: &api{s.URL, s.Client()}, namespace: "mustang-bench-x"}
	ended := make(chan error, 1)
	go func() { ended <- w.close() }()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "kubectl delete ns mustang-bench-x") {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		s.CloseClientConnections()
		t.Error("an API server that does not answer is waited for")
	}
}
