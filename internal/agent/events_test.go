// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/mustang-net/mustang/internal/k8s"
)

// telling is problems whose API server notes what it is told.
type telling struct {
	*problems
	slow chan struct{} // not nil: each event takes until something comes

	noted sync.Mutex
	uids  map[object]string
	told  []string
}

// newTelling is for use in a bubble, whose time is its own.
func newTelling(t *testing.T) *telling {
	w := &telling{uids: map[object]string{}}
	w.problems = newProblems(slog.New(slog.DiscardHandler), w.uidOf, func(ctx context.Context, _ k8s.Kind, key k8s.Key, uid, sentence string) error {
		w.noted.Lock()
		w.told = append(w.told, key.Name+" "+uid+" "+sentence)
		w.noted.Unlock()
		if w.slow != nil {
			select {
			case <-w.slow:
			case <-ctx.Done():
			}
		}
		return nil
	})
	ctx, end := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); w.run(ctx) }()
	t.Cleanup(func() { end(); <-done })
	return w
}

func (w *telling) uidOf(o object) string {
	w.noted.Lock()
	defer w.noted.Unlock()
	return w.uids[o]
}

// service is one that the API server has.
func (w *telling) service(name string) object {
	o := serviceAt(k8s.Key{Namespace: "shop", Name: name})
	w.noted.Lock()
	defer w.noted.Unlock()
	w.uids[o] = "u-" + name
	return o
}

// all is what has been told when nothing more is to come by itself.
func (w *telling) all() []string {
	synctest.Wait()
	w.noted.Lock()
	defer w.noted.Unlock()
	return slices.Clone(w.told)
}

func TestAProblemIsToldWithItsObjectsUID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTelling(t)
		w.object(w.service("web"), []string{"a", "b"})
		w.object(serviceAt(k8s.Key{Namespace: "shop", Name: "gone"}), []string{"a"})
		if got := w.all(); !slices.Equal(got, []string{"web u-web a", "web u-web b"}) {
			t.Errorf("told: %q", got)
		}
	})
}

// Somebody who breaks and mends an object over and over does not have every node
// write each time, and takes nothing from other objects.
func TestWhatComesAndGoesIsToldWithinALimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTelling(t)
		o := w.service("web")
		toggle := func() {
			w.object(o, []string{"a"})
			synctest.Wait()
			w.object(o, nil)
		}
		for range 200 {
			toggle()
		}
		if got := w.all(); len(got) != burstOfOne {
			t.Errorf("told %d times, want %d", len(got), burstOfOne)
		}
		time.Sleep(afterBurst)
		toggle()
		toggle()
		if got := w.all(); len(got) != burstOfOne+1 {
			t.Errorf("five minutes later told %d times, want one more", len(got))
		}
		w.object(w.service("db"), []string{"a"})
		if got := w.all(); got[len(got)-1] != "db u-db a" {
			t.Errorf("of another object nothing is told, but %q", got[len(got)-1])
		}
	})
}

func TestWhatWaitsIsBoundedAndTrueWhenItIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTelling(t)
		w.slow = make(chan struct{})
		web, db := w.service("web"), w.service("db")
		w.object(web, []string{"first"}) // the API server does not answer
		synctest.Wait()
		for i := range 3 * waiting {
			w.object(web, []string{fmt.Sprint("passing ", i)})
		}
		w.object(web, []string{"a", "b"})
		w.object(web, []string{"b"})
		w.failed(db, context.DeadlineExceeded)
		w.works(db)
		w.object(db, []string{"c"})
		w.mu.Lock()
		if n := len(w.news.at); n > waiting {
			t.Errorf("%d sentences wait", n)
		}
		w.mu.Unlock()
		close(w.slow)
		if got := w.all(); !slices.Equal(got, []string{"web u-web first", "web u-web b", "db u-db c"}) {
			t.Errorf("told: %q", got)
		}
	})
}

func TestManyObjectsAreToldAtAPaceAndForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTelling(t)
		for i := range waiting {
			w.object(w.service(fmt.Sprint(i)), []string{"a"})
		}
		if got := w.all(); len(got) > burst {
			t.Errorf("%d are told at once", len(got))
		}
		time.Sleep(waiting / pace * time.Second)
		if got := w.all(); len(got) != waiting {
			t.Errorf("%d are told in the end", len(got))
		}
		time.Sleep(afterBurst)
		w.object(w.service("last"), []string{"a"})
		if got := w.all(); len(got) != waiting+1 || len(w.limits) != 1 {
			t.Errorf("%d are told; %d objects' limits are kept", len(got), len(w.limits))
		}
	})
}

func TestTheUIDIsTheObjectsOfNow(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	a := &Agent{watch: (&k8s.Client{}).NewWatch(log, k8s.Services, k8s.Policies)}
	at := func(uid types.UID) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: uid}
	}
	web := k8s.Key{Namespace: "shop", Name: "web"}
	for _, uid := range []types.UID{"1", "2"} {
		must(t, a.watch.Services.Replace([]any{&corev1.Service{ObjectMeta: at("s" + uid)}}, ""))
		must(t, a.watch.Policies.Replace([]any{&networkingv1.NetworkPolicy{ObjectMeta: at("p" + uid)}}, ""))
		if s, p := a.uid(serviceAt(web)), a.uid(policyAt(web)); s != "s"+string(uid) || p != "p"+string(uid) {
			t.Errorf("the Service's is %q, the NetworkPolicy's %q", s, p)
		}
	}
	if got := a.uid(serviceAt(k8s.Key{Namespace: "shop", Name: "gone"})); got != "" {
		t.Errorf("of one that is gone it is %q", got)
	}
}
