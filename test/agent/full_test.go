// SPDX-License-Identifier: Apache-2.0

package agent_test

// NetworkPolicies that do not fit into the node's tables, which are small here:
// what does not fit is closed, counted and named, nobody else is hurt, and it
// heals when there is room.

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Entries of the small tables. Of identities, the node's own addresses and the
// pods' that every test has take some.
const (
	fullPeers      = 16
	fullPorts      = 16
	fullPrefixes   = 8
	fullIdentities = 64
)

func TestFullPolicyTables(t *testing.T) {
	w := newNode(t)
	w.shrink(map[string]uint32{
		"mst_peers_v1": fullPeers, "mst_ports_v1": fullPorts, "mst_prefixes_v1": fullPrefixes, "mst_identities_v1": fullIdentities,
	})
	w.begin(0)
	w.namespace("shop", "env", "prod")
	w.namespace("other", "env", "test")
	w.namespace("crowd", "env", "crowd")
	p := &policyWorld{world: w, web: w.kubePod("shop", "web"), db: w.kubePod("shop", "db"), far: w.kubePod("other", "far")}
	for _, pod := range []*kubePod{p.web, p.db, p.far} {
		w.createPod(pod)
		w.connect(pod)
		w.serve(pod.Pod)
	}
	// Who must not be hurt: web asks db by a policy that fits. Its name comes last.
	p.putPolicy("z-fits", fromWeb)
	p.expect(p.far, p.db, false)
	p.expect(p.web, p.db, true)
	w.client = p.web.Pod
	traffic := w.traffic(netip.AddrPortFrom(p.db.IPv4, serverPort), p.db.Name)
	for _, c := range []struct {
		name string
		run  func(*policyWorld)
	}{
		{"too many peers", func(w *policyWorld) { w.testFull(tooManyPeers(w), "peers") }},
		{"too many ports", func(w *policyWorld) { w.testFull(tooManyPorts(w), "ports") }},
		{"too many prefixes", func(w *policyWorld) { w.testFull(tooManyPrefixes(w), "prefixes") }},
		{"too many single addresses", func(w *policyWorld) { w.testFull(tooManyAddresses(w), "identities") }},
		{"another policy goes", (*policyWorld).testRoomByPolicy},
		{"pods go", (*policyWorld).testRoomByPods},
		{"too many pods", (*policyWorld).testManyPods},
	} {
		t.Run(c.name, func(t *testing.T) {
			sub, in := *w, *p
			sub.t = t
			in.world = &sub
			c.run(&in)
		})
	}
	traffic.end(t)
}

// shrink makes tables with this many entries before there are any. What they are
// like is taken from those that the tool makes.
func (w *world) shrink(entries map[string]uint32) {
	w.t.Helper()
	run := func(args ...string) {
		w.t.Helper()
		if _, errs, code := w.mustang("", args...); code != 0 {
			w.t.Fatalf("mustang %v: %s", args, errs)
		}
	}
	run("svc", "add", "--service", "192.0.2.1:80")
	dir := filepath.Join(w.lab.BPFFS(), "maps")
	specs := map[string]*ebpf.MapSpec{}
	for name, n := range entries {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		must(w.t, err)
		info, err := m.Info()
		must(w.t, err)
		specs[name] = &ebpf.MapSpec{Name: info.Name, Type: info.Type, KeySize: info.KeySize, ValueSize: info.ValueSize, Flags: info.Flags, MaxEntries: n}
		must(w.t, m.Close())
	}
	run("reset")
	must(w.t, os.MkdirAll(dir, 0o700))
	for name, spec := range specs {
		m, err := ebpf.NewMap(spec)
		must(w.t, err)
		must(w.t, m.Pin(filepath.Join(dir, name)))
		must(w.t, m.Close())
	}
}

// The rules are about far, in the namespace other. Each time the last one allows
// web, and does not fit.
const selectFar = "podSelector: {matchLabels: {app: far}}, policyTypes: [Ingress]"

const webPeer = "namespaceSelector: {matchLabels: {env: prod}}, podSelector: {matchLabels: {app: web}}"

func tooManyPeers(*policyWorld) string {
	var rules []string
	for i := range fullPeers {
		rules = append(rules, fmt.Sprintf("{from: [{ipBlock: {cidr: 192.0.2.%d/32}}]}", i))
	}
	return fmt.Sprintf("{%s, ingress: [%s, {from: [{%s}]}]}", selectFar, strings.Join(rules, ", "), webPeer)
}

func tooManyPorts(*policyWorld) string {
	ports := []string{fmt.Sprintf("{port: %d}", serverPort)}
	for i := range fullPorts {
		ports = append(ports, fmt.Sprintf("{port: %d}", 1001+2*i))
	}
	return fmt.Sprintf("{%s, ingress: [{from: [{%s}], ports: [%s]}]}", selectFar, webPeer, strings.Join(ports, ", "))
}

// blocksOf is a rule with n blocks, and web's addresses.
func (w *policyWorld) blocksOf(n int, format string) string {
	blocks := []string{fmt.Sprintf("{ipBlock: {cidr: %s/32}}", w.web.IPv4), fmt.Sprintf("{ipBlock: {cidr: '%s/128'}}", w.web.IPv6)}
	for i := range n {
		blocks = append(blocks, fmt.Sprintf("{ipBlock: {cidr: "+format+"}}", i))
	}
	return fmt.Sprintf("{%s, ingress: [{from: [%s]}]}", selectFar, strings.Join(blocks, ", "))
}

func tooManyPrefixes(w *policyWorld) string  { return w.blocksOf(fullPrefixes, "198.51.%d.0/24") }
func tooManyAddresses(w *policyWorld) string { return w.blocksOf(fullIdentities, "192.0.2.%d/32") }

// testFull: a policy whose last rule does not fit into a table is closed there,
// counted and named; also after the agent was killed. With fewer rules it heals.
func (w *policyWorld) testFull(spec, table string) {
	w.expect(w.web, w.far, true)
	before := w.incomplete()
	w.put(policyOf(w.t, "other", "a-big", spec))
	w.expect(w.web, w.far, false)
	w.unfit("other", "a-big", "the table of "+table+" is full")
	w.holds(w.web, w.far, false)
	if now := w.incomplete(); now <= before {
		w.t.Errorf("%v packets were dropped as policy_incomplete before, %v are now", before, now)
	}
	w.holds(w.web, w.db, true)
	out, errs, code := w.mustang("", "policy", "ls")
	if code != 0 || !strings.Contains(out, "does not fit: the table of "+table+" is full") {
		w.t.Errorf("policy ls: %s\n%s", errs, out)
	}
	w.killAgent()
	w.holds(w.web, w.far, false)
	w.startAgent()
	w.synced()
	w.unfit("other", "a-big", "the table of "+table+" is full")
	w.holds(w.web, w.far, false)
	w.holds(w.web, w.db, true)

	w.put(policyOf(w.t, "other", "a-big", fmt.Sprintf("{%s, ingress: [{from: [{%s}]}]}", selectFar, webPeer)))
	w.expect(w.web, w.far, true)
	w.holds(w.db, w.far, false)
	w.fits("other", "a-big")
	w.deletePolicyIn("other", "a-big")
	w.expect(w.db, w.far, true)
}

// testRoomByPolicy: what took the room goes, and nobody touches what had none.
func (w *policyWorld) testRoomByPolicy() {
	first := strings.ReplaceAll(tooManyPeers(w), selectFar, "podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress]")
	w.putPolicy("took-all", first)
	w.unfit("shop", "took-all", "the table of peers is full")
	w.put(policyOf(w.t, "other", "late", fmt.Sprintf("{%s, ingress: [{from: [{%s}]}]}", selectFar, webPeer)))
	w.unfit("other", "late", "the table of peers is full")
	w.expect(w.web, w.far, false)
	w.deletePolicy("took-all")
	w.expect(w.web, w.far, true)
	w.holds(w.db, w.far, false)
	w.fits("other", "late")
	w.fits("shop", "took-all")
	w.deletePolicyIn("other", "late")
	w.expect(w.db, w.far, true)
}

// testRoomByPods: the pods that a rule is for go, and others' rule has their room. What tells pods apart takes room as far
// as a rule asks for it.
func (w *policyWorld) testRoomByPods() {
	crowd := w.crowd(fullPeers-1, true)
	const all = "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{namespaceSelector: {matchLabels: {env: crowd}}%s}]}]}"
	var numbers []string
	for i := range crowd {
		numbers = append(numbers, fmt.Sprintf("'%d'", i))
	}
	told := fmt.Sprintf(all, fmt.Sprintf(", podSelector: {matchExpressions: [{key: number, operator: In, values: [%s]}]}", strings.Join(numbers, ", ")))
	late := policyOf(w.t, "other", "late", fmt.Sprintf("{%s, ingress: [{from: [{%s}]}]}", selectFar, webPeer))
	// Whom no rule tells apart take one entry.
	w.putPolicy("for-a-crowd", fmt.Sprintf(all, ""))
	w.put(late)
	w.expect(w.db, w.far, false)
	w.expect(w.web, w.far, true)
	w.fits("other", "late")
	w.deletePolicyIn("other", "late")
	w.expect(w.db, w.far, true)
	w.putPolicy("for-a-crowd", told)
	w.expect(w.db, w.web, false)
	w.put(late)
	w.unfit("other", "late", "the table of peers is full")
	w.expect(w.web, w.far, false)
	w.disperse(crowd)
	w.expect(w.web, w.far, true)
	w.fits("other", "late")
	w.deletePolicy("for-a-crowd")
	w.deletePolicyIn("other", "late")
	w.expect(w.db, w.far, true)
}

// testManyPods: alike pods whose addresses do not all fit. Who has room keeps it.
func (w *policyWorld) testManyPods() {
	w.putPolicy("for-a-crowd", "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{namespaceSelector: {matchLabels: {env: crowd}}}]}]}")
	w.expect(w.db, w.web, false)
	w.fits("shop", "for-a-crowd")
	crowd := w.crowd(fullIdentities, false)
	w.unfit("shop", "for-a-crowd", "the table of identities is full")
	w.holds(w.web, w.db, true)
	eventually(w.t, "addresses that are left out are counted", func() error {
		_, body, err := w.get(metrics, "/metrics")
		if err == nil && strings.Contains(body, "mustang_policy_addresses_left_out 0\n") {
			err = errors.New("none is")
		}
		return err
	})
	w.killAgent()
	w.startAgent()
	w.synced()
	w.holds(w.web, w.db, true)
	w.disperse(crowd)
	w.fits("shop", "for-a-crowd")
	w.deletePolicy("for-a-crowd")
	w.expect(w.db, w.web, true)
}

// crowd are pods of another node; each with labels of its own, or all alike.
func (w *world) crowd(n int, different bool) (names []string) {
	w.t.Helper()
	no := false
	for i := range n {
		name := fmt.Sprintf("crowd%d", i)
		labels := map[string]string{"app": "crowd"}
		if different {
			labels["number"] = fmt.Sprint(i)
		}
		pod := corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "crowd", Labels: labels},
			Spec:       corev1.PodSpec{NodeName: "n2", AutomountServiceAccountToken: &no, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}
		var made corev1.Pod
		must(w.t, w.api.Do(context.Background(), http.MethodPost, podsPath("crowd"), pod, &made))
		ip := netip.AddrFrom4([4]byte{10, 251, 0, byte(i + 1)}).String()
		made.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
		must(w.t, w.api.Do(context.Background(), http.MethodPut, podsPath("crowd")+"/"+name+"/status", made, nil))
		names = append(names, name)
	}
	return names
}

func (w *world) disperse(names []string) {
	w.t.Helper()
	zero := int64(0)
	for _, name := range names {
		must(w.t, w.api.Do(context.Background(), http.MethodDelete, podsPath("crowd")+"/"+name, metav1.DeleteOptions{GracePeriodSeconds: &zero}, nil))
	}
}

func (w *policyWorld) deletePolicyIn(namespace, name string) {
	w.t.Helper()
	must(w.t, w.api.Do(context.Background(), http.MethodDelete, policiesPath(namespace)+"/"+name, nil, nil))
}

// incomplete is how many packets were dropped because a rule has no room.
func (w *world) incomplete() (n float64) {
	w.t.Helper()
	_, body, err := w.get(metrics, "/metrics")
	must(w.t, err)
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, `mustang_drops_total{`) && strings.Contains(line, `reason="policy_incomplete"`) {
			var one float64
			_, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &one)
			must(w.t, err)
			n += one
		}
	}
	return n
}

// unfit waits until a policy is named everywhere as not in force in whole, and
// wants no other to be.
func (w *policyWorld) unfit(namespace, name, sentence string) {
	w.t.Helper()
	eventually(w.t, name+" is named everywhere", func() error {
		code, body, err := w.get(health, "/healthz")
		if err != nil || code != http.StatusOK || !strings.Contains(body, sentence) || !strings.Contains(body, "NetworkPolicy "+namespace+"/"+name) {
			return fmt.Errorf("/healthz: %d %s %v", code, body, err)
		}
		if strings.Contains(body, "z-fits") {
			return fmt.Errorf("/healthz blames another: %s", body)
		}
		metric := fmt.Sprintf(`mustang_policy_problem{namespace="%s",policy="%s"} 1`, namespace, name)
		if _, body, err = w.get(metrics, "/metrics"); err != nil || !strings.Contains(body, metric) {
			return fmt.Errorf("/metrics has no %s: %v", metric, err)
		}
		var events corev1.EventList
		if err := w.api.Do(w.t.Context(), http.MethodGet, "/api/v1/namespaces/"+namespace+"/events", nil, &events); err != nil {
			return err
		}
		for _, e := range events.Items {
			if e.InvolvedObject.Kind == "NetworkPolicy" && e.InvolvedObject.Name == name && strings.Contains(e.Message, sentence) {
				return nil
			}
		}
		return fmt.Errorf("no event among %d", len(events.Items))
	})
	text, err := os.ReadFile(w.log.Name())
	if err != nil || !strings.Contains(string(text), "NetworkPolicy "+namespace+"/"+name) {
		w.t.Errorf("the log does not name it: %v", err)
	}
}

// fits waits until a policy is in force in whole.
func (w *policyWorld) fits(namespace, name string) {
	w.t.Helper()
	eventually(w.t, name+" has no problem", func() error {
		_, body, err := w.get(health, "/healthz")
		if err == nil && strings.Contains(body, namespace+"/"+name) {
			err = errors.New(body)
		}
		return err
	})
	_, body, err := w.get(metrics, "/metrics")
	if err != nil || strings.Contains(body, `policy="`+name+`"`) {
		w.t.Errorf("/metrics still names %s: %v", name, err)
	}
}
