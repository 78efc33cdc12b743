// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/netns"
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

// While policy cannot be written, what changes waits for the next try, is not lost, and is not told of each time.
func TestWhilePolicyFailsChangesWait(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	named := func(name string) *networkingv1.NetworkPolicy {
		return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		var told bytes.Buffer
		w.agent.log = slog.New(slog.NewTextHandler(&told, nil))
		p := w.agent.policies
		turn := func(when string, due bool, pause time.Duration) {
			t.Helper()
			if due {
				p.due = time.Now()
			}
			w.turn()
			if p.pause != pause || p.fails() != (pause > 0) {
				t.Errorf("%s: the next try is after %v, want %v", when, p.pause, pause)
			}
		}
		w.tellObjects(nil, nil)
		turn("at first", false, 0)
		check(t, os.Remove(filepath.Join(w.config.StateDir, "policy-names.json")))
		full := filepath.Join(w.config.StateDir, ".new-policy-names.json") // it cannot be written, as on a full /run
		check(t, os.MkdirAll(filepath.Join(full, "x"), 0o700))
		check(t, w.agent.watch.Policies.Add(named("goes")))
		turn("it fails", false, retryFirst)
		p.due = time.Now().Add(time.Hour)
		check(t, w.agent.watch.Policies.Add(named("stays")))
		turn("something changes", false, retryFirst)
		turn("it fails again", true, 2*retryFirst)
		p.due = time.Now().Add(time.Hour)
		check(t, w.agent.watch.Policies.Delete(named("goes")))
		turn("something goes", false, 2*retryFirst)
		check(t, os.RemoveAll(full))
		turn("it works", true, 0)
		check(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
			m, err := e.Policies()
			if err == nil && (len(m.Policies()) != 1 || m.Policies()[0].Name != "stays") {
				t.Errorf("policies in force are %v, want the one that stays", m.Policies())
			}
			return err
		}))
		if n := strings.Count(told.String(), "level=ERROR"); n != 1 {
			t.Errorf("%d sentences about one failure:\n%s", n, told.String())
		}
	})
}

// podOf is a pod that runs.
func podOf(name, node, ip string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: ip}}}}
}

// A pod that no endpoint holds is named: it was there before mustang, or all that was known of it is lost.
func TestAPodWithoutAnEndpointIsNamed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	name := fmt.Sprintf("mst-unheld-%d", os.Getpid())
	must(t, netns.Create(netns.Path(name)))
	defer func() { check(t, netns.Delete(netns.Path(name))) }()
	now := metav1.Now()
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		here := w.config.Node
		pods := map[string]*corev1.Pod{"unheld": podOf("unheld", here, "10.1.1.9"), "elsewhere": podOf("elsewhere", "other", "10.1.2.9"), "host": podOf("host", here, "192.0.2.1"),
			"leaves": podOf("leaves", here, "10.1.1.8"), "ended": podOf("ended", here, "10.1.1.7"), "starts": podOf("starts", here, ""), "held": podOf("held", here, "10.1.1.2")}
		pods["host"].Spec.HostNetwork = true
		pods["leaves"].DeletionTimestamp = &now
		pods["ended"].Status.Phase = corev1.PodSucceeded
		pods["starts"].Status.PodIPs = nil
		var list []any
		for _, p := range pods {
			list = append(list, p)
		}
		named := func() (out []string) {
			families, err := w.agent.metrics.registry.Gather()
			must(t, err)
			for _, f := range families {
				for _, m := range f.GetMetric() {
					if f.GetName() == "mustang_pod_without_endpoint" {
						out = append(out, m.GetLabel()[1].GetValue())
					}
				}
			}
			return out
		}
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Pods.Replace(list, ""))
		w.turn()
		if got := named(); len(got) > 0 {
			t.Errorf("where somebody else connects pods, %v are named", got)
		}
		w.agent.config.CNIConfDir = "/etc/cni/net.d"
		if got := named(); !slices.Equal(got, []string{"held", "unheld"}) {
			t.Errorf("without an endpoint %v are named", got)
		}
		w.agent.config.CNIConfDir = None
		script := fmt.Sprintf("ip link add h1 up type veth peer name eth0 netns %[1]s && ip -n %[1]s addr add 10.1.1.2/32 dev eth0 && ip -n %[1]s link set eth0 up", name)
		if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
			_, err := e.AddEndpoint(t.Context(), engine.EndpointSpec{Netns: netns.Path(name), IfName: "eth0", Owner: state.OwnerCNI, Pod: state.PodRef{Namespace: "ns", Name: "held"}})
			return err
		}))
		if got := named(); !slices.Equal(got, []string{"unheld"}) {
			t.Errorf("with an endpoint %v are named", got)
		}
		// The kubelet takes a pod's network away before it says that the pod has ended: long before, while the API server is away.
		deleted := pods["unheld"].DeepCopy()
		deleted.DeletionTimestamp = &now
		check(t, w.agent.watch.Pods.Update(deleted))
		w.turn()
		if got := named(); len(got) > 0 {
			t.Errorf("while it is being deleted %v are named", got)
		}
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
		leaves := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "leaves", CreationTimestamp: metav1.Unix(2000, 0), DeletionTimestamp: &metav1.Time{Time: time.Unix(3000, 0)}},
			Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.1.0.1"}}}} // and has let go of it
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Pods.Replace(append(pods, leaves), ""))
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
