// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// A pod may be newer than what decides about it while pods are followed, and that is not.
func TestWhatDecidesAboutPodsMayBeBehind(t *testing.T) {
	w := (&Client{}).NewWatch(slog.New(slog.DiscardHandler), Pods, Namespaces, Policies)
	away := errors.New("away")
	for _, c := range []struct {
		pods, namespaces, policies error
		behind                     bool
	}{
		{nil, nil, nil, false},
		{nil, nil, away, true},
		{nil, away, nil, true},
		{away, away, away, false},
		{away, nil, nil, false},
	} {
		w.connected(Pods, c.pods)
		w.connected(Namespaces, c.namespaces)
		w.connected(Policies, c.policies)
		if got := w.Behind(); got != c.behind {
			t.Errorf("pods %v, namespaces %v, policies %v: behind %v, want %v", c.pods, c.namespaces, c.policies, got, c.behind)
		}
	}
}

// A watch that comes back too late to go on from where it was is answered, and ends at once.
// Until the list that comes then is in the table, what is known of policies is old.
func TestWhatIsListedAnewIsBehind(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("watch") == "" {
			fmt.Fprint(w, `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicyList", "metadata": {"resourceVersion": "9"}, "items": []}`)
			return
		}
		if r.URL.Query().Get("resourceVersion") == "1" {
			fmt.Fprintln(w, `{"type": "ERROR", "object": {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Expired", "code": 410}}`)
		}
	}))
	defer server.Close()
	client := clientOf(t, server.URL)
	w := client.NewWatch(slog.New(slog.DiscardHandler), Pods, Namespaces, Policies)
	for _, kind := range []Kind{Pods, Namespaces, Policies} {
		w.connected(kind, nil)
	}
	src := source{w, Policies, client.networking, "networkpolicies", "", &networkingv1.NetworkPolicyList{}, w.Policies.Transformer()}
	follow := func(o metav1.ListOptions) {
		t.Helper()
		in, err := src.WatchWithContext(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Stop()
		for e := range in.ResultChan() {
			if e.Type != watch.Error {
				t.Errorf("an event: %v", e)
			}
		}
	}
	want := func(behind bool, when string) {
		t.Helper()
		if w.Behind() != behind {
			t.Errorf("%s: behind is %v", when, !behind)
		}
	}
	follow(metav1.ListOptions{ResourceVersion: "1"})
	want(true, "what was missed cannot be told any more")
	yes := true
	follow(metav1.ListOptions{SendInitialEvents: &yes})
	want(true, "a list is being streamed")
	if _, err := src.ListWithContext(t.Context(), metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	want(true, "a list is being read")
	if err := w.Policies.Replace(nil, "9"); err != nil {
		t.Fatal(err)
	}
	want(false, "the list is in the table")
	follow(metav1.ListOptions{ResourceVersion: "9"})
	want(false, "a watch went on, and ended")
}

// To look at all objects copies none.
func TestAllObjectsAreNotCopied(t *testing.T) {
	w := (&Client{}).NewWatch(slog.New(slog.DiscardHandler), Pods)
	for i := range 1000 {
		if err := w.Pods.Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i)}}); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	if allocs := testing.AllocsPerRun(3, func() {
		for range w.Pods.All() {
			n++
		}
	}); n != 4000 || allocs > 5 {
		t.Errorf("%d objects, %v allocations", n/4, allocs)
	}
}

// What comes of a Service's slices does not depend on which of them was heard of first, as
// after a restart.
func TestSlicesCountInTheOrderOfTheirNames(t *testing.T) {
	web := parse[corev1.Service](t, spec(plainSpec))
	var slices []any
	for _, name := range []string{"a", "b"} {
		s := parse[discoveryv1.EndpointSlice](t, of(plainSlice+"endpoints: [{addresses: [10.1.0.1], nodeName: on-"+name+"}]"))
		s.Name = name
		slices = append(slices, s)
	}
	for _, first := range []int{0, 1} {
		w := (&Client{}).NewWatch(slog.New(slog.DiscardHandler), Services, Slices)
		for _, err := range []error{w.Services.Add(web), w.Slices.Add(slices[first]), w.Slices.Add(slices[1-first])} {
			if err != nil {
				t.Fatal(err)
			}
		}
		tr := NewTranslator(w, node)
		tr.Affected(w.Take())
		got, _, _ := tr.Service(Key{"shop", "web"})
		if b := got.Ports[0].Backends; len(b) != 1 || b[0].Node != "on-a" {
			t.Errorf("heard of number %d first: the backends are %+v", first, b)
		}
	}
}
