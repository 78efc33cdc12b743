// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/state"
)

// checked is a Service with a health check, and with a source range that is none.
func checked(name, address string, port int32) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ClusterIP: address, ClusterIPs: []string{address},
		ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: port,
		LoadBalancerSourceRanges: []string{"everywhere"}, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
	}}
}

// While everything is to be replaced, as after another zone, Services go: their health
// check's port is a successor's, and nobody hears of their problems any more.
func TestWhatGoesWhileEverythingIsReplaced(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		lo, err := netlink.LinkByName("lo")
		must(t, err)
		must(t, netlink.LinkSetUp(lo))
		w := newScripted(t)
		defer func() { w.agent.checks.close(); w.close() }()
		w.tellObjects([]any{checked("old", "10.96.0.1", 31999), checked("moves", "10.96.0.2", 31998)}, nil)
		w.turn()
		if n := w.agent.problems.count(k8s.Services); n != 2 || len(w.agent.checks.servers) != 2 {
			t.Fatalf("%d Services have problems, %d a health check; want 2 each", n, len(w.agent.checks.servers))
		}
		zone := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.config.Node, Labels: map[string]string{corev1.LabelTopologyZone: "z"}}}
		check(t, w.agent.watch.Nodes.Replace([]any{zone}, ""))
		check(t, w.agent.watch.Services.Replace([]any{checked("new", "10.96.0.3", 31999)}, ""))
		w.turn()
		for o, sentences := range w.agent.problems.list() {
			if o.key.Name != "new" || strings.Contains(strings.Join(sentences, " "), "healthCheckNodePort") {
				t.Errorf("%v is said to have a problem: %q", o, sentences)
			}
		}
		for port, open := range map[int]bool{31999: true, 31998: false} {
			c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
			if err == nil {
				c.Close()
			}
			if (err == nil) != open {
				t.Errorf("port %d: %v, want it open: %v", port, err, open)
			}
		}
	})
}

// Of two Services that claim one address, the one that had it keeps it when the node's zone
// changes, be it the younger.
func TestAnotherZoneLeavesAddressesWhereTheyAre(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		claims := func(name, address string, created int64) *corev1.Service {
			return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.Unix(created, 0)}, Spec: corev1.ServiceSpec{
				ClusterIP: address, ExternalIPs: []string{"198.51.100.7"}, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}}
		}
		older := claims("older", "10.96.0.1", 1000)
		w.tellObjects([]any{claims("younger", "10.96.0.2", 2000)}, nil)
		w.turn()
		check(t, w.agent.watch.Services.Add(older))
		w.turn()
		loser := func() (list []string) {
			for o := range w.agent.problems.list() {
				list = append(list, o.key.Name)
			}
			return list
		}
		if got := loser(); !slices.Equal(got, []string{"older"}) {
			t.Fatalf("%q wait for the address, want the older", got)
		}
		check(t, w.agent.watch.Nodes.Replace([]any{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.config.Node,
			Labels: map[string]string{corev1.LabelTopologyZone: "z"}}}}, ""))
		w.turn()
		if got := loser(); !slices.Equal(got, []string{"older"}) {
			t.Errorf("in another zone %q wait for the address, want the older", got)
		}
	})
}

// A port passes from one health check to another within one turn, whichever Service is
// looked at first; a client that says nothing delays nobody.
func TestAHealthChecksPortPassesOn(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		lo, err := netlink.LinkByName("lo")
		must(t, err)
		must(t, netlink.LinkSetUp(lo))
		w := newScripted(t)
		defer func() { w.agent.checks.close(); w.close() }()
		w.tellObjects([]any{checked("a", "10.96.0.1", 31998), checked("b", "10.96.0.2", 31999)}, nil)
		w.turn()
		silent, err := net.Dial("tcp", "127.0.0.1:31999")
		must(t, err)
		defer silent.Close()
		check(t, w.agent.watch.Services.Update(checked("a", "10.96.0.1", 31999)))
		check(t, w.agent.watch.Services.Update(checked("b", "10.96.0.2", 31997)))
		start := time.Now()
		w.turn()
		if took := time.Since(start); took > stopPatience/2 {
			t.Errorf("the change took %v", took)
		}
		for o, sentences := range w.agent.problems.list() {
			if strings.Contains(strings.Join(sentences, " "), "healthCheckNodePort") {
				t.Errorf("%v has a problem: %q", o, sentences)
			}
		}
	})
}

// A port that a process of the node has is asked for again.
func TestAHealthChecksPortIsAskedForAgain(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		lo, err := netlink.LinkByName("lo")
		must(t, err)
		must(t, netlink.LinkSetUp(lo))
		w := newScripted(t)
		defer func() { w.agent.checks.close(); w.close() }()
		other, err := net.Listen("tcp", ":31999")
		must(t, err)
		w.tellObjects([]any{checked("a", "10.96.0.1", 31999)}, nil)
		w.turn()
		taken := func() bool { return strings.Contains(fmt.Sprint(w.agent.problems.list()), "healthCheckNodePort 31999") }
		if !taken() {
			t.Error("that the port is taken is not told")
		}
		must(t, other.Close())
		w.agent.sync.recheck()
		if taken() {
			t.Error("the port is free, and is not served")
		}
	})
}

// An agent starts, and some Services cannot be written: what they had in force stays, until
// they go.
func TestWhatCannotBeWrittenAtTheStartStays(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer func() { w.close() }()
		plain := func(name, address string, port int32) *corev1.Service {
			return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.ServiceSpec{
				ClusterIP: address, Ports: []corev1.ServicePort{{Name: "a", Port: 80, Protocol: corev1.ProtocolTCP}, {Name: "b", Port: port, Protocol: corev1.ProtocolTCP}}}}
		}
		is := func(when string, want ...string) {
			t.Helper()
			if got := slicesSorted(w.tables()); !slices.Equal(got, want) {
				t.Errorf("%s: there are %q, want %q", when, got, want)
			}
		}
		w.tellObjects([]any{plain("fails", "10.96.1.1", 81), plain("too", "10.96.1.2", 81), plain("gone", "10.96.0.2", 81), plain("works", "10.96.0.3", 81)}, nil)
		w.turn()
		w.close()
		w.open()
		w.faults.about = netip.MustParsePrefix("10.96.1.0/24")
		w.tellObjects([]any{plain("fails", "10.96.1.1", 82), plain("too", "10.96.1.2", 82), plain("works", "10.96.0.3", 82)}, nil)
		w.turn()
		is("two cannot be written", "tcp 10.96.0.3:80", "tcp 10.96.0.3:82", "tcp 10.96.1.1:80", "tcp 10.96.1.2:80")
		check(t, w.agent.watch.Services.Delete(plain("fails", "10.96.1.1", 82)))
		w.turn()
		is("one goes", "tcp 10.96.0.3:80", "tcp 10.96.0.3:82", "tcp 10.96.1.2:80")
		w.faults.about = netip.Prefix{}
		w.turn()
		is("the other can be written", "tcp 10.96.0.3:80", "tcp 10.96.0.3:82", "tcp 10.96.1.2:80", "tcp 10.96.1.2:82")
	})
}

// A node that is about to be deleted takes no new clients by the Services of all nodes. Who asks
// for a Service's own endpoints finds those that are there still.
func TestANodeThatGoesServesItsEndpoints(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer func() { w.agent.checks.close(); w.close() }()
		here, tcp, port := w.config.Node, corev1.ProtocolTCP, int32(80)
		endpoints := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a-1", Labels: map[string]string{discoveryv1.LabelServiceName: "a"}},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Protocol: &tcp, Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}, NodeName: &here}}}
		w.tellObjects([]any{checked("a", "10.96.0.1", 31999)}, []any{endpoints})
		check(t, w.agent.watch.Nodes.Replace([]any{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: here},
			Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Effect: corev1.TaintEffectNoSchedule}}}}}, ""))
		w.turn()
		if h := w.agent.healthy(); *h.NodeEligible || len(h.Because) == 0 {
			t.Errorf("the node takes new clients: %+v", h)
		}
		if h := w.agent.works(); strings.Contains(strings.Join(h.Because, "; "), "deleted") {
			t.Errorf("its agent is not ready, which holds up the rollout of the others: %+v", h)
		}
		key, answer := k8s.Key{Namespace: "ns", Name: "a"}, httptest.NewRecorder()
		w.agent.checks.handler(key, w.agent.checks.servers[key]).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", nil))
		if answer.Code != http.StatusOK {
			t.Errorf("the Service's check answers %d: %s", answer.Code, answer.Body)
		}
	})
}

// A pod of the node's network drains at its node's address, and its Service goes before it.
func TestAPodThatDrainsKeepsWhatItHas(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		for _, hostNetwork := range []bool{false, true} {
			w := newScripted(t)
			yes, tcp, port, now := true, corev1.ProtocolTCP, int32(80), metav1.Now()
			slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a-1", Labels: map[string]string{discoveryv1.LabelServiceName: "a"}},
				AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Protocol: &tcp, Port: &port}},
				Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}, Conditions: discoveryv1.EndpointConditions{Terminating: &yes}}}}
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", DeletionTimestamp: &now},
				Spec: corev1.PodSpec{HostNetwork: hostNetwork}, Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.1.0.1"}}}}
			w.tellObjects(nil, []any{slice})
			check(t, w.agent.watch.Pods.Replace([]any{pod}, ""))
			w.turn()
			check(t, w.agent.watch.Slices.Delete(slice))
			w.turn()
			if gone := w.agent.sync.gone; len(gone) != 1 {
				t.Errorf("host network %v: %v are to end, want the one that drains, later", hostNetwork, gone)
			}
			check(t, w.agent.watch.Pods.Delete(pod))
			w.turn()
			if gone := w.agent.sync.gone; len(gone) != 0 {
				t.Errorf("host network %v: %v are still to end without the pod", hostNetwork, gone)
			}
			w.close()
		}
	})
}

// Who could not be told that an endpoint is gone, as on a full /run, is told later.
func TestWhatIsGoneIsToldUntilItIsKnown(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		yes, tcp, port := true, corev1.ProtocolTCP, int32(80)
		old := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a-1", Labels: map[string]string{discoveryv1.LabelServiceName: "a"}},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Protocol: &tcp, Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}, Conditions: discoveryv1.EndpointConditions{Terminating: &yes}}}}
		w.tellObjects(nil, []any{old})
		w.turn()
		full := filepath.Join(w.config.StateDir, "journal.json")
		check(t, os.MkdirAll(filepath.Join(full, "x"), 0o700))
		check(t, w.agent.watch.Slices.Delete(old))
		w.turn()
		if gone := w.agent.sync.gone; len(gone) != 1 {
			t.Errorf("%v are to be told of again, want the one that is gone", gone)
		}
		check(t, os.RemoveAll(full))
		w.turn()
		if gone := w.agent.sync.gone; len(gone) != 0 {
			t.Errorf("%v are still to be told of", gone)
		}
	})
}

// Pods of the node's network share an address: of one that ends, its own port is told.
func TestAtANodesAddressOnePortIsGone(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	w := newScripted(t)
	defer w.close()
	yes, tcp := true, corev1.ProtocolTCP
	slice := func(name, address string, port int32) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Protocol: &tcp, Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{address}, Conditions: discoveryv1.EndpointConditions{Terminating: &yes}}}}
	}
	ends := []any{slice("host", "192.0.2.1", 80), slice("pod", "10.1.0.1", 80), slice("moves", "192.0.2.1", 82)}
	w.tellObjects(nil, append(slices.Clone(ends), slice("beside", "192.0.2.1", 81), slice("other", "192.0.2.1", 82)))
	check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", "10.1.0.0/24")}, ""))
	for _, s := range ends {
		check(t, w.agent.watch.Slices.Delete(s))
	}
	got := map[state.Backend]bool{}
	for _, b := range w.agent.sync.inNoSlice(w.agent.watch.TakeGone()) {
		got[b] = true
	}
	want := map[state.Backend]bool{{AddrPort: netip.MustParseAddrPort("192.0.2.1:80"), Protocol: state.TCP}: true, {AddrPort: netip.MustParseAddrPort("10.1.0.1:0")}: true}
	if !maps.Equal(got, want) {
		t.Errorf("%v are gone, want %v", got, want)
	}
}

// At the start of an agent in a large cluster its first turn is long, and no reason to end it.
func TestALongFirstTurnIsAlive(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		var services []any
		for i := range together + 1 {
			services = append(services, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint(i)}, Spec: corev1.ServiceSpec{
				ClusterIP: fmt.Sprintf("10.96.%d.%d", i>>8, i&255), Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}})
		}
		w.tellObjects(services, nil)
		signs := map[*time.Time]bool{w.agent.sync.alive.Load(): true}
		w.faults.puts = func() { signs[w.agent.sync.alive.Load()] = true }
		w.turn()
		if len(signs) != 3 {
			t.Errorf("%d signs of life until the last write, want one before, one after policy, one between two parts of the Services", len(signs))
		}
	})
}
