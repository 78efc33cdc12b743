// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/state"
)

// perEndpoint is how many bytes of the heap an endpoint may take, with its part
// of a Service that has 50.
const perEndpoint = 320

// A Service more than are brought into force at once, several times over; then
// the same in a new process, where one of them is gone and one is another's.
func TestManyServices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	const count, each = 4*together + 1, 50
	inNamespace(func() {
		w := newScripted(t)
		defer func() { w.close() }()
		before := live()
		w.tellMany(0, count, each)
		w.turn()
		took := (live() - before) / (count * each)
		t.Logf("%d bytes an endpoint", took)
		if took > perEndpoint {
			t.Errorf("an endpoint takes %d bytes of the heap, and is to take at most %d", took, perEndpoint)
		}
		w.areMany(0, count, each)
		w.close()
		w.open()
		w.areMany(0, count, each)
		w.tellMany(1, count, each)
		w.turn()
		w.areMany(1, count, each)
	})
}

func live() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

func serviceAddress(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
}

// tellMany tells of Services, all numbers from first on and below count. From
// first on their names are others.
func (w *scripted) tellMany(first, count, each int) {
	w.t.Helper()
	var services, slices []any
	for i := first; i < count; i++ {
		meta := metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("s%d", i)}
		if i == first {
			meta.Name = fmt.Sprintf("first%d", first)
		}
		ip := serviceAddress(i).String()
		services = append(services, &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{{Port: 80}}}})
		meta.Labels = map[string]string{discoveryv1.LabelServiceName: meta.Name}
		port, slice := int32(8080), &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4}
		slice.Ports = []discoveryv1.EndpointPort{{Port: &port}}
		for j := range each {
			k := i*each + j
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{netip.AddrFrom4([4]byte{172, 16 + byte(k>>16), byte(k >> 8), byte(k)}).String()}})
		}
		slices = append(slices, slice)
	}
	w.tellObjects(services, slices)
}

// areMany wants what tellMany told, and nothing else, in the tables.
func (w *scripted) areMany(first, count, each int) {
	w.t.Helper()
	tables := w.tables()
	if len(tables) != count-first {
		w.t.Errorf("%d frontends are in force, of %d", len(tables), count-first)
	}
	for i := first; i < count; i++ {
		at := fmt.Sprintf("%v %v:80", state.TCP, serviceAddress(i))
		if got := tables[at]; len(got) < each*len("172.16.0.0:8080") {
			w.t.Errorf("%s has %q", at, got)
		}
	}
}
