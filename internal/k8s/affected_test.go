// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// A change concerns the Service that it is of, and a slice that passes from one Service to
// another concerns both: the one that has lost it would lead to endpoints of the other.
func TestAChangeConcernsItsServices(t *testing.T) {
	w := (&Client{}).NewWatch(slog.New(slog.DiscardHandler), Services, Slices)
	tr := NewTranslator(w, node)
	for _, name := range []string{"web", "api"} {
		s := parse[corev1.Service](t, spec(plainSpec))
		s.Name = name
		if err := w.Services.Add(s); err != nil {
			t.Fatal(err)
		}
	}
	one := func(name, service, trigger string) *discoveryv1.EndpointSlice {
		s := parse[discoveryv1.EndpointSlice](t, of(plainSlice+"endpoints: [{addresses: [10.1.0.1]}]"))
		s.Name, s.Labels[discoveryv1.LabelServiceName] = name, service
		if trigger != "" {
			s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: trigger}
		}
		return s
	}
	const first, second = "2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z"
	backends := func(name string) int {
		s, _, ok := tr.Service(Key{"shop", name})
		if !ok {
			t.Fatalf("%s is not known", name)
		}
		return len(s.Ports[0].Backends)
	}
	for _, step := range []struct {
		does     string
		change   func() error
		want     string // Services, each with how many trigger times
		web, api int    // backends afterwards
	}{
		{"both are new", func() error { return nil }, "web 0, api 0", 0, 0},
		{"a slice", func() error { return w.Slices.Add(one("a", "web", first)) }, "web 1", 1, 0},
		{"it and another at once", func() error {
			moved := one("a", "web", second)
			moved.Endpoints[0].Addresses[0] = "10.1.0.2"
			return errors.Join(w.Slices.Add(moved), w.Slices.Add(one("b", "web", first)))
		}, "web 2", 2, 0},
		{"a Service and its slice", func() error {
			s := parse[corev1.Service](t, spec(plainSpec))
			s.Name = "api"
			return errors.Join(w.Services.Add(s), w.Slices.Add(one("c", "api", "")))
		}, "api 0", 2, 1},
		{"one of nobody", func() error { return w.Slices.Add(one("d", "", "")) }, "", 2, 1},
		{"it passes to another", func() error { return w.Slices.Add(one("c", "web", first)) }, "api 0, web 1", 2, 0},
		{"it goes", func() error { return w.Slices.Delete(one("c", "web", "")) }, "web 0", 2, 0},
		{"it belongs to nobody any more", func() error { return w.Slices.Add(one("a", "", "")) }, "web 0", 1, 0},
		{"the last goes", func() error { return w.Slices.Delete(one("b", "web", "")) }, "web 0", 0, 0},
	} {
		if err := step.change(); err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		var got []string
		for _, a := range tr.Affected(w.Take()) {
			got = append(got, fmt.Sprintf("%s %d", a.Key.Name, len(a.Triggered)))
			if a.At.IsZero() || a.At.After(before) {
				t.Errorf("%s: %s is concerned since %v", step.does, a.Key.Name, a.At)
			}
			for _, at := range a.Triggered {
				if text := at.Format(time.RFC3339); text != first && text != second {
					t.Errorf("%s: it was triggered at %s", step.does, text)
				}
			}
		}
		if text := strings.Join(got, ", "); text != step.want {
			t.Errorf("%s: it concerns %q, want %q", step.does, text, step.want)
		}
		if web, api := backends("web"), backends("api"); web != step.web || api != step.api {
			t.Errorf("%s: web has %d backends, api %d; want %d and %d", step.does, web, api, step.web, step.api)
		}
	}
	if len(tr.of) != 0 || len(tr.has) != 0 {
		t.Errorf("no slice is left, and known of them is %v, %v", tr.of, tr.has)
	}
}

// What of a Service and of its slices is not in force is told, with the slice's name.
func TestProblemsOfSlicesNameThem(t *testing.T) {
	w := (&Client{}).NewWatch(slog.New(slog.DiscardHandler), Services, Slices)
	tr := NewTranslator(w, node)
	err := errors.Join(
		w.Services.Add(parse[corev1.Service](t, spec(strings.Replace(plainSpec, "protocol: TCP", "protocol: QUIC", 1)))),
		w.Slices.Add(parse[discoveryv1.EndpointSlice](t, of(plainSlice+"endpoints: [{addresses: ['127.0.0.1']}]"))))
	if err != nil {
		t.Fatal(err)
	}
	tr.Affected(w.Take())
	_, problems, _ := tr.Service(Key{"shop", "web"})
	if text := strings.Join(problems, "\n"); len(problems) != 2 || !strings.Contains(text, "QUIC") || !strings.Contains(text, `EndpointSlice web-1: endpoint "127.0.0.1"`) {
		t.Errorf("problems: %s", text)
	}
}
