// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/state"
)

// While everything is told for the first time and cannot be written, the cluster goes on.
func TestWhatGoesWhileTheFirstPolicyFailsIsGone(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "ns", Name: name} }
	stays, goes := &networkingv1.NetworkPolicy{ObjectMeta: meta("stays")}, &networkingv1.NetworkPolicy{ObjectMeta: meta("goes")}
	pod := &corev1.Pod{ObjectMeta: meta("goes"), Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.1.0.1"}}}}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		full := filepath.Join(w.config.StateDir, "policy-names.json") // cannot be written, as on a full /run
		check(t, os.MkdirAll(filepath.Join(full, "x"), 0o700))
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Policies.Replace([]any{stays, goes}, ""))
		check(t, w.agent.watch.Pods.Replace([]any{pod}, ""))
		w.turn()
		if w.agent.policies.ready() {
			t.Error("ready although nothing could be written")
		}
		check(t, os.RemoveAll(full))
		check(t, w.agent.watch.Policies.Delete(goes))
		check(t, w.agent.watch.Pods.Delete(pod))
		w.agent.policies.due = w.agent.policies.due.Add(-retryMost)
		w.turn()
		if !w.agent.policies.ready() {
			t.Error("not ready")
		}
		check(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
			m, err := e.Policies()
			if err != nil {
				return err
			}
			if list := m.Policies(); len(list) != 1 || list[0].Name != "stays" {
				t.Errorf("policies in force are %v, want the one that stays", list)
			}
			if p, found := m.PodAt(netip.MustParseAddr("10.1.0.1")); found {
				t.Errorf("pod %v is still known", p.Key)
			}
			return nil
		}))
	})
}

// A pod of a node that died is not gone yet, and its address is another's by now. An agent that
// starts hears of both at once.
func TestOfTwoPodsTheYoungerHasTheAddress(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		var pods []any
		for i := range 32 { // by chance, the youngest is the last that is heard of once in 32 times
			pods = append(pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("p", i), CreationTimestamp: metav1.Unix(int64(1000+i), 0)},
				Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.1.0.1"}}}})
		}
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Pods.Replace(pods, ""))
		w.turn()
		check(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
			m, err := e.Policies()
			if err != nil {
				return err
			}
			if p, _ := m.PodAt(netip.MustParseAddr("10.1.0.1")); p.Name != "p31" {
				t.Errorf("the address is %v's, want the youngest's", p.Key)
			}
			return nil
		}))
	})
}

// After an outage of the API server each kind comes back by itself. A pod that is heard of
// before the policy that was made before it does not start yet.
func TestAPodWaitsForPoliciesThatMayBeOlder(t *testing.T) {
	var behind atomic.Bool
	behind.Store(true)
	key := k8s.Key{Namespace: "ns", Name: "new"}
	p := &policies{behind: behind.Load, whole: true, news: make(chan struct{}), here: map[k8s.Key]*k8s.Pod{key: {UID: "u"}}}
	ask := func(patience time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := p.labels(ctx, state.PodRef{Namespace: key.Namespace, Name: key.Name, UID: "u"})
		return err
	}
	if err := ask(3 * behindPause); err == nil || !strings.Contains(err.Error(), "NetworkPolicies") {
		t.Errorf("the answer is %v, want that NetworkPolicies are not told of", err)
	}
	time.AfterFunc(behindPause, func() { behind.Store(false) })
	if err := ask(time.Minute); err != nil {
		t.Error(err)
	}
	if err := ask(time.Minute); err != nil {
		t.Error(err)
	}
}
