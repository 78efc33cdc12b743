// SPDX-License-Identifier: Apache-2.0

package agent_test

// NetworkPolicies of a real API server, on pods that the CNI plugin connects
// with the agent's help: who reaches whom, by TCP, in both families.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

func TestPolicies(t *testing.T) {
	w := newWorld(t, 0)
	w.namespace("shop", "env", "prod")
	w.namespace("other", "env", "test")
	p := &policyWorld{world: w, web: w.kubePod("shop", "web"), db: w.kubePod("shop", "db"), far: w.kubePod("other", "far")}
	for _, pod := range []*kubePod{p.web, p.db, p.far} {
		w.createPod(pod)
		w.connect(pod)
		w.serve(pod.Pod)
	}
	for _, c := range []struct {
		name string
		run  func(*policyWorld)
	}{
		{"a policy comes, changes and goes", (*policyWorld).testPolicyChanges},
		{"labels of a pod change under a connection", (*policyWorld).testLabels},
		{"labels of a namespace change", (*policyWorld).testNamespaceLabels},
		{"a new pod is closed from its first instant", (*policyWorld).testHammer},
		{"a pod waits until it is known", (*policyWorld).testWaits},
		{"the command line's policies are its own", (*policyWorld).testOwners},
		{"what was stopped and what passed is named", (*policyWorld).testNamed},
		{"what cannot be read is named, and closed", (*policyWorld).testUnreadable},
		{"the agent is killed", (*policyWorld).testKilledAgent},
		{"the API server is away", (*policyWorld).testNoAPIServer},
		{"programs settle", (*policyWorld).testSettled},
		{"delays are measured", (*policyWorld).testMeasured},
	} {
		t.Run(c.name, func(t *testing.T) {
			sub, in := *w, *p
			sub.t = t
			in.world = &sub
			c.run(&in)
		})
	}
}

type policyWorld struct {
	*world
	web, db, far *kubePod
}

func policiesPath(namespace string) string {
	return "/apis/networking.k8s.io/v1/namespaces/" + namespace + "/networkpolicies"
}

// policyOf is a NetworkPolicy; spec is its YAML.
func policyOf(t *testing.T, namespace, name, spec string) *networkingv1.NetworkPolicy {
	t.Helper()
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	must(t, yaml.UnmarshalStrict([]byte(spec), &p.Spec))
	return p
}

func (w *policyWorld) putPolicy(name, spec string) {
	w.t.Helper()
	w.put(policyOf(w.t, "shop", name, spec))
}

func (w *policyWorld) deletePolicy(names ...string) {
	w.t.Helper()
	for _, name := range names {
		must(w.t, w.api.Do(context.Background(), http.MethodDelete, policiesPath("shop")+"/"+name, nil, nil))
	}
}

const (
	denyAll   = "{podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress]}"
	fromWeb   = "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: web}]}]}"
	fromTests = "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{namespaceSelector: {matchLabels: {env: test}}}]}]}"
)

func (w *policyWorld) testPolicyChanges() {
	w.expect(w.web, w.db, true)
	w.expect(w.far, w.db, true)
	w.putPolicy("p", denyAll)
	w.expect(w.web, w.db, false)
	w.expect(w.far, w.db, false)
	w.putPolicy("p", fromWeb)
	w.expect(w.web, w.db, true)
	w.holds(w.far, w.db, false)
	w.putPolicy("q", fromTests) // a union
	w.expect(w.far, w.db, true)
	w.holds(w.web, w.db, true)
	w.deletePolicy("p")
	w.expect(w.web, w.db, false)
	w.deletePolicy("q")
	w.expect(w.web, w.db, true)
	w.putPolicy("e", "{podSelector: {matchLabels: {app: db}}, policyTypes: [Egress]}")
	w.expect(w.db, w.web, false)
	w.holds(w.web, w.db, true)
	w.deletePolicy("e")
	w.expect(w.db, w.web, true)
}

func (w *policyWorld) testLabels() {
	w.putPolicy("p", fromWeb)
	w.expect(w.far, w.db, false)
	talk := w.converse(w.web, w.db)
	w.relabel(w.web, map[string]string{"app": "stranger"})
	w.expect(w.web, w.db, false)
	if err := talk.say(tries); err == nil {
		w.t.Error("a connection goes on that is not allowed any more")
	}
	w.relabel(w.web, map[string]string{"app": "web", "more": "yes"})
	w.expect(w.web, w.db, true)
	// The selected pod's labels, too.
	w.relabel(w.db, map[string]string{"app": "free"})
	w.expect(w.far, w.db, true)
	w.relabel(w.db, w.db.labels)
	w.expect(w.far, w.db, false)
	w.deletePolicy("p")
}

func (w *policyWorld) testNamespaceLabels() {
	w.putPolicy("p", fromTests)
	w.expect(w.web, w.db, false)
	w.expect(w.far, w.db, true)
	w.namespace("other", "env", "prod")
	w.expect(w.far, w.db, false)
	w.namespace("shop", "env", "test")
	w.expect(w.web, w.db, true)
	w.namespace("shop", "env", "prod")
	w.namespace("other", "env", "test")
	w.expect(w.web, w.db, false)
	w.expect(w.far, w.db, true)
	w.deletePolicy("p")
}

// testHammer: before a pod has an interface, somebody sends to its address all
// the time, and a process inside sends all the time.
func (w *policyWorld) testHammer() {
	w.putPolicy("p", "{podSelector: {matchLabels: {app: late}}, policyTypes: [Ingress, Egress]}")
	late := w.kubePod("shop", "late")
	v4, v6 := netip.MustParseAddr("10.250.0.77"), netip.MustParseAddr("fd00:250::77")
	in, out := w.listen(late), w.listen(w.far)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	for _, to := range []netip.Addr{v4, v6} {
		hammer(ctx, w.t, w.far, netip.AddrPortFrom(to, hammerPort))
	}
	for _, to := range []netip.Addr{w.far.IPv4, w.far.IPv6} {
		hammer(ctx, w.t, late, netip.AddrPortFrom(to, hammerPort))
	}
	w.createPod(late)
	w.connect(late, v4, v6)
	time.Sleep(300 * time.Millisecond)
	if n := in.Load(); n > 0 {
		w.t.Errorf("%d datagrams came in", n)
	}
	if n := out.Load(); n > 0 {
		w.t.Errorf("%d datagrams went out", n)
	}
	w.deletePolicy("p")
	eventually(w.t, "without the policy, all are heard", func() error {
		if in.Load() == 0 || out.Load() == 0 {
			return fmt.Errorf("%d in, %d out", in.Load(), out.Load())
		}
		return nil
	})
	stop()
	w.deletePod(late)
}

// testWaits: an ADD that comes before its pod is heard of.
func (w *policyWorld) testWaits() {
	w.putPolicy("p", "{podSelector: {matchLabels: {app: early}}, policyTypes: [Ingress]}")
	early := w.kubePod("shop", "early")
	added := make(chan error, 1)
	var out []byte
	go func() {
		var err error
		out, err = w.cni("ADD", early)
		added <- err
	}()
	select {
	case err := <-added:
		w.t.Fatalf("ADD ended before the pod was known: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	w.createPod(early)
	must(w.t, <-added)
	w.learn(early, out)
	w.serve(early.Pod)
	w.holds(w.web, early, false)
	w.deletePolicy("p")
	w.expect(w.web, early, true)
	// A pod that the API server has forgotten is closed while it lives.
	w.deletePod(early)
	w.expect(w.web, early, false)
	w.disconnect(early)
}

func (w *policyWorld) testOwners() {
	text, err := yaml.Marshal(map[string]any{
		"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": map[string]string{"namespace": "shop", "name": "p"},
		"spec": json.RawMessage(`{"podSelector":{"matchLabels":{"app":"web"}},"policyTypes":["Ingress"]}`),
	})
	must(w.t, err)
	if _, errs, code := w.mustang(string(text), "policy", "apply", "-f", "-"); code != 0 {
		w.t.Fatal(errs)
	}
	w.expect(w.db, w.web, false)
	w.putPolicy("p", denyAll) // of the same name
	w.expect(w.web, w.db, false)
	w.holds(w.db, w.web, false)
	out, _, _ := w.mustang("", "policy", "ls")
	if !strings.Contains(out, "kubernetes") || !strings.Contains(out, "cli") {
		w.t.Errorf("policy ls:\n%s", out)
	}
	w.deletePolicy("p")
	w.expect(w.web, w.db, true)
	w.holds(w.db, w.web, false)
	if _, errs, code := w.mustang("", "policy", "rm", "shop/p"); code != 0 {
		w.t.Fatal(errs)
	}
	w.expect(w.db, w.web, true)
}

// testNamed: who looks at the node beside the agent is told objects' names.
func (w *policyWorld) testNamed() {
	w.putPolicy("only-web", fromWeb)
	w.expect(w.far, w.db, false)
	out, errs, code := w.mustang("", "observe", "--last", "20", "--pod", "shop/db", "-o", "json")
	if code != 0 || !strings.Contains(out, `"selected_by":["shop/only-web"]`) {
		w.t.Errorf("observe: %d %s\n%s", code, errs, out)
	}
	out, errs, _ = w.mustang("", "why", "other/far", fmt.Sprintf("shop/db:%d", serverPort))
	if !strings.Contains(out, "because shop/only-web selects it") {
		w.t.Errorf("why: %s\n%s", errs, out)
	}
	out, errs, _ = w.mustang("", "why", "shop/web", fmt.Sprintf("shop/db:%d", serverPort))
	if !strings.Contains(out, "allowed by rule 1 of shop/only-web") {
		w.t.Errorf("why: %s\n%s", errs, out)
	}
	w.relabel(w.far, map[string]string{"app": "far", "seen": "new"})
	eventually(w.t, "a pod's new labels are seen", func() error {
		out, _, _ := w.mustang("", "why", "other/far", fmt.Sprintf("shop/db:%d", serverPort))
		if !strings.Contains(out, `"seen":"new"`) {
			return errors.New(out)
		}
		return nil
	})
	w.deletePolicy("only-web")
	w.expect(w.far, w.db, true)
}

// testUnreadable: the API server takes more than is well defined.
func (w *policyWorld) testUnreadable() {
	p := policyOf(w.t, "shop", "odd", "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{ipBlock: {cidr: '::ffff:10.0.0.0/104'}}]}, {from: [{podSelector: {matchLabels: {app: web}}}]}]}")
	if err := w.tryPut(p); err != nil {
		w.t.Fatalf("the API server refuses the object that this test is about: %v", err)
	}
	w.expect(w.far, w.db, false)
	w.holds(w.web, w.db, true)
	eventually(w.t, "it is named everywhere", func() error {
		const sentence = "spec.ingress[0].from[0].ipBlock.cidr"
		_, body, err := w.get(health, "/healthz")
		if err != nil || !strings.Contains(body, sentence) || !strings.Contains(body, "NetworkPolicy shop/odd") {
			return fmt.Errorf("/healthz: %s %v", body, err)
		}
		if _, body, err = w.get(metrics, "/metrics"); err != nil || !strings.Contains(body, `mustang_policy_problem{namespace="shop",policy="odd"} 1`) {
			return fmt.Errorf("/metrics: %v", err)
		}
		var events corev1.EventList
		if err := w.api.Do(w.t.Context(), http.MethodGet, "/api/v1/namespaces/shop/events", nil, &events); err != nil {
			return err
		}
		for _, e := range events.Items {
			if e.InvolvedObject.Kind == "NetworkPolicy" && strings.Contains(e.Message, sentence) {
				return nil
			}
		}
		return fmt.Errorf("no event among %d", len(events.Items))
	})
	w.deletePolicy("odd")
	eventually(w.t, "it has no problem any more", func() error {
		_, body, err := w.get(health, "/healthz")
		if strings.Contains(body, "odd") {
			return errors.New(body)
		}
		return err
	})
	w.expect(w.far, w.db, true)
}

func (w *policyWorld) testKilledAgent() {
	w.putPolicy("p", fromWeb)
	w.expect(w.far, w.db, false)
	talk := w.converse(w.web, w.db)
	gone := w.kubePod("shop", "gone")
	w.createPod(gone)
	out, err := w.cni("ADD", gone)
	must(w.t, err)
	w.learn(gone, out)
	w.killAgent()
	w.holds(w.far, w.db, false)
	w.holds(w.web, w.db, true)
	check(w.t, talk.say(patience))
	if _, errs, code := w.mustang("", "policy", "rm", "shop/p"); code == 0 || !strings.Contains(errs, "its agent's, which does not run") {
		w.t.Errorf("a policy without the agent: %d %s", code, errs)
	}
	// A pod goes; another comes, and waits for an agent.
	w.disconnect(gone)
	w.holds(w.far, w.db, false)
	late := w.kubePod("shop", "new")
	w.createPod(late)
	added := w.addLater(late)
	// What changes meanwhile is in force after the next start, on pods that were there.
	w.putPolicy("p", denyAll)
	w.holds(w.web, w.db, true)
	check(w.t, talk.say(patience))
	w.startAgent()
	w.expect(w.web, w.db, false)
	w.holds(w.far, w.db, false)
	must(w.t, <-added)
	w.putPolicy("p", fromWeb)
	w.expect(w.web, w.db, true)
	check(w.t, talk.say(patience))
	w.deletePod(gone)
	w.goodbye(late)
	w.deletePolicy("p")
	w.expect(w.far, w.db, true)
}

// addLater connects a pod in the background.
func (w *policyWorld) addLater(p *kubePod) chan error {
	done := make(chan error, 1)
	go func() {
		_, err := w.cni("ADD", p)
		done <- err
	}()
	select {
	case err := <-done:
		w.t.Fatalf("ADD does not wait: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	return done
}

func (w *policyWorld) goodbye(p *kubePod) {
	w.t.Helper()
	w.disconnect(p)
	w.deletePod(p)
}

func (w *policyWorld) testNoAPIServer() {
	w.putPolicy("p", fromWeb)
	w.expect(w.far, w.db, false)
	talk := w.converse(w.web, w.db)
	late := w.kubePod("shop", "late")
	w.createPod(late)
	still := func() {
		w.t.Helper()
		w.holds(w.far, w.db, false)
		w.holds(w.web, w.db, true)
		check(w.t, talk.say(patience))
	}
	w.api.Kill()
	still()
	w.killAgent()
	w.startAgent() // it knows nothing, and changes nothing
	eventually(w.t, "the agent lives without an API server", func() error {
		code, body, err := w.get(health, "/livez")
		if code != http.StatusOK {
			err = errors.Join(err, errors.New(body))
		}
		return err
	})
	still()
	if _, errs, code := w.mustang("", "policy", "ls"); code == 0 || !strings.Contains(errs, "has not heard everything") {
		w.t.Errorf("policy ls: %d %s", code, errs)
	}
	added := w.addLater(late)
	still()
	must(w.t, w.api.Start(w.t.Context()))
	must(w.t, <-added)
	w.synced()
	still()
	w.goodbye(late)
	w.deletePolicy("p")
	w.expect(w.far, w.db, true)
}

func (w *policyWorld) testMeasured() {
	w.putPolicy("p", denyAll)
	w.expect(w.web, w.db, false)
	w.deletePolicy("p")
	w.expect(w.web, w.db, true)
	late := w.kubePod("shop", "measured")
	w.createPod(late)
	_, err := w.cni("ADD", late)
	must(w.t, err)
	w.goodbye(late)
	_, body, err := w.get(metrics, "/metrics")
	must(w.t, err)
	for _, name := range []string{"mustang_policy_apply_delay_seconds", "mustang_policy_add_delay_seconds"} {
		if !strings.Contains(body, name+"_bucket") || strings.Contains(body, name+"_count 0\n") {
			w.t.Errorf("%s is not measured", name)
		}
	}
	eventually(w.t, "the agent has heard that the pod is gone", func() error {
		_, body, err := w.get(metrics, "/metrics")
		for _, name := range []string{"mustang_policies_with_problems 0", "mustang_policy_addresses_left_out 0", "mustang_kubernetes_pods 3"} {
			if !strings.Contains(body, name+"\n") {
				err = errors.Join(err, fmt.Errorf("no %s in /metrics", name))
			}
		}
		return err
	})
}

// testSettled: once pods have started, their programs get links, beneath a
// connection and under a policy.
func (w *policyWorld) testSettled() {
	w.putPolicy("p", fromWeb)
	w.expect(w.web, w.db, true)
	w.expect(w.far, w.db, false)
	c := w.converse(w.web, w.db)
	eventually(w.t, "every pod has links", func() error {
		check(w.t, c.say(5*time.Second))
		if got, err := reaches(w.far, w.db, tries); err != nil || got {
			w.t.Fatalf("%s reaches %s: %v, %v", w.far.Name, w.db.Name, got, err)
		}
		out, errs, code := w.mustang("", "ep", "ls", "-o", "json")
		if code != 0 {
			return errors.New(errs)
		}
		var list []struct{ Netns, Attach string }
		must(w.t, json.Unmarshal([]byte(out), &list))
		for _, ep := range list {
			if ep.Attach != "tcx" {
				return fmt.Errorf("%s has %s", ep.Netns, ep.Attach)
			}
		}
		return nil
	})
	w.holds(w.far, w.db, false)
	w.deletePolicy("p")
}
