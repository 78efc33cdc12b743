// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/k8s"
)

// bestOf is the shortest of three turns: another process may have had the processor.
func bestOf(turn func()) time.Duration {
	best := time.Hour
	for range 3 {
		start := time.Now()
		turn()
		best = min(best, time.Since(start))
	}
	return best
}

// TestManyEndpointsDrain: Services with 30,000 endpoints go, and the pods take their
// time. Every change of anything looks at them again, so that must not take long.
func TestManyEndpointsDrain(t *testing.T) {
	const count = 30000
	a := &Agent{watch: (&k8s.Client{}).NewWatch(slog.New(slog.DiscardHandler), k8s.Pods)}
	var pods []any
	var addrs []netip.Addr
	now := metav1.Now()
	for i := range count {
		addr := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		addrs = append(addrs, addr)
		pods = append(pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprint(i), DeletionTimestamp: &now},
			Status: corev1.PodStatus{PodIP: addr.String(), PodIPs: []corev1.PodIP{{IP: addr.String()}}}})
	}
	must(t, a.watch.Pods.Replace(pods, ""))
	gone := netip.MustParseAddr("10.2.0.1")
	list := append(slices.Clone(addrs), gone, addrs[0])
	s := &syncer{a: a}
	var others, draining []netip.Addr
	took := bestOf(func() { others, draining = s.withoutDraining(list) })
	if !slices.Equal(others, []netip.Addr{gone}) || !slices.Equal(draining, addrs) {
		t.Errorf("%d others, %d that drain", len(others), len(draining))
	}
	if took > 150*time.Millisecond {
		t.Errorf("it takes %v to look at %d endpoints that drain", took, count)
	}
}

// TestManyProblemsAtOnce: a table is full, and 10,000 objects are named for it, while no
// event is written yet.
func TestManyProblemsAtOnce(t *testing.T) {
	const count = 10000
	none := func(context.Context, k8s.Kind, k8s.Key, string, string) error { return nil }
	now := map[object][]string{}
	for i := range count {
		now[policyAt(k8s.Key{Namespace: "shop", Name: fmt.Sprint(i)})] = []string{"the table is full"}
	}
	best := bestOf(func() {
		p := newProblems(slog.New(slog.DiscardHandler), nil, none)
		p.replace(k8s.Policies, fromEngine, now)
		if n := len(p.news.at); n != waiting {
			t.Errorf("%d sentences wait", n)
		}
		p.replace(k8s.Policies, fromEngine, map[object][]string{})
		if n := len(p.news.at); n != 0 || p.news.order.Len() != 0 {
			t.Errorf("%d sentences wait that hold no more", n)
		}
	})
	if best > 300*time.Millisecond {
		t.Errorf("it takes %v to note %d problems", best, count)
	}
}
