// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/state"
)

// draining is a syncer of a cluster in which so many pods drain, and what it is to tell
// apart: backends at their addresses, one of them twice, and one more.
func draining(tb testing.TB, count int) (s *syncer, list, pods []state.Backend, gone state.Backend) {
	tb.Helper()
	a := &Agent{watch: (&k8s.Client{}).NewWatch(slog.New(slog.DiscardHandler), k8s.Pods)}
	var objects []any
	now := metav1.Now()
	for i := range count {
		addr := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		pods = append(pods, state.Backend{AddrPort: netip.AddrPortFrom(addr, 80), Protocol: state.TCP})
		objects = append(objects, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprint(i), DeletionTimestamp: &now},
			Status: corev1.PodStatus{PodIP: addr.String(), PodIPs: []corev1.PodIP{{IP: addr.String()}}}})
	}
	if err := a.watch.Pods.Replace(objects, ""); err != nil {
		tb.Fatal(err)
	}
	gone = state.Backend{AddrPort: netip.MustParseAddrPort("10.2.0.1:80"), Protocol: state.TCP}
	return &syncer{a: a}, append(slices.Clone(pods), gone, pods[0]), pods, gone
}

func TestEndpointsThatDrainAreTakenOnce(t *testing.T) {
	s, list, pods, gone := draining(t, 300)
	if others, drain := s.withoutDraining(list); !slices.Equal(others, []state.Backend{gone}) || !slices.Equal(drain, pods) {
		t.Errorf("%d others, %d that drain", len(others), len(drain))
	}
}

// While pods drain, nothing is looked at again for what is told of others.
func TestPodsThatDrainAreLookedAtWhenTheyChange(t *testing.T) {
	s, _, pods, _ := draining(t, 3)
	s.gone = pods[:1]
	changed := func(name string) []k8s.Change {
		return []k8s.Change{{Kind: k8s.Pods, Key: k8s.Key{Namespace: "shop", Name: name}}}
	}
	for _, c := range []struct {
		changes []k8s.Change
		gone    []state.Backend
		looks   bool
	}{{nil, nil, false}, {changed("1"), nil, false}, {changed("0"), nil, true}, {nil, pods[2:], true}, {changed("1"), nil, false}, {changed("2"), nil, true}} {
		s.end(t.Context()) // no engine: nothing of it ends
		s.ending(c.changes, c.gone)
		if looks := s.drain == nil; looks != c.looks {
			t.Errorf("%v change, %v are gone: it looks: %v", c.changes, c.gone, looks)
		}
	}
}

// Services with 30,000 endpoints go, and the pods take their time.
func BenchmarkEndpointsThatDrain(b *testing.B) {
	s, list, _, _ := draining(b, 30000)
	for b.Loop() {
		s.withoutDraining(list)
	}
}

// atOnce names so many objects for one reason, while no event is written yet, and takes it back.
func atOnce(tb testing.TB, count int) {
	tb.Helper()
	none := func(context.Context, k8s.Kind, k8s.Key, string, string) error { return nil }
	now := map[object][]string{}
	for i := range count {
		now[policyAt(k8s.Key{Namespace: "shop", Name: fmt.Sprint(i)})] = []string{"the table is full"}
	}
	p := newProblems(slog.New(slog.DiscardHandler), nil, none)
	p.replace(k8s.Policies, fromEngine, now)
	if n := len(p.news.at); n != min(count, waiting) {
		tb.Errorf("%d sentences wait", n)
	}
	p.replace(k8s.Policies, fromEngine, map[object][]string{})
	if n := len(p.news.at); n != 0 || p.news.order.Len() != 0 {
		tb.Errorf("%d sentences wait that hold no more", n)
	}
}

func TestSentencesThatHoldNoMoreDoNotWait(t *testing.T) { atOnce(t, waiting+100) }

func BenchmarkManyProblemsAtOnce(b *testing.B) {
	for b.Loop() {
		atOnce(b, 10000)
	}
}
