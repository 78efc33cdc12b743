// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// reread is what etcd's value of a key holds.
func reread[T message](t *testing.T, p put, into T) T {
	t.Helper()
	k := kept[T]{object: into}
	if err := k.decode(p.value); err != nil {
		t.Fatal(err)
	}
	if k.envelope.Kind != "Thing" {
		t.Errorf("%s: the envelope is %+v", p.key, k.envelope)
	}
	return k.object
}

func TestAnObjectLikeThePattern(t *testing.T) {
	meta := func() metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: "s0", Namespace: "default", UID: "u0", Labels: map[string]string{"l": "m"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "me", Time: &metav1.Time{}}}}
	}
	thing := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "Thing"}}
	port := int32(80)
	p := &pattern{endpoint: discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, NodeName: new(string)}}
	p.service = kept[*corev1.Service]{thing, &corev1.Service{ObjectMeta: meta(), Spec: corev1.ServiceSpec{
		ClusterIP: "10.96.0.9", ClusterIPs: []string{"10.96.0.9"}, Ports: []corev1.ServicePort{{Port: port}}}}}
	p.slice = kept[*discoveryv1.EndpointSlice]{thing, &discoveryv1.EndpointSlice{ObjectMeta: meta(), Ports: []discoveryv1.EndpointPort{{Port: &port}}}}
	p.address = kept[*networkingv1.IPAddress]{thing, &networkingv1.IPAddress{ObjectMeta: meta(), Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "services", Name: "s0"}}}}

	uids := map[string]bool{}
	for _, l := range []Like{
		{"s1", netip.MustParseAddr("fd00::1"), nil},
		{"s2", netip.MustParseAddr("10.97.0.2"), []netip.Addr{netip.MustParseAddr("172.16.0.1"), netip.MustParseAddr("172.16.0.2")}},
	} {
		puts, err := p.like(l)
		if err != nil {
			t.Fatal(err)
		}
		var keys []string
		for _, p := range puts {
			keys = append(keys, string(p.key))
		}
		want := []string{"/registry/ipaddresses/" + l.ClusterIP.String(), "/registry/services/specs/default/" + l.Name, "/registry/endpointslices/default/" + l.Name}
		if diff := cmp.Diff(want, keys); diff != "" {
			t.Fatalf("keys:\n%s", diff)
		}
		address, service, slice := reread(t, puts[0], &networkingv1.IPAddress{}), reread(t, puts[1], &corev1.Service{}), reread(t, puts[2], &discoveryv1.EndpointSlice{})
		for _, o := range []metav1.Object{address, service, slice} {
			if f := o.GetManagedFields(); len(f) != 1 || f[0].Manager != "me" || f[0].Time.IsZero() || o.GetCreationTimestamp().Year() < 2000 || o.GetLabels()["l"] != "m" {
				t.Errorf("%s lacks something: %+v", l.Name, o)
			}
			uids[string(o.GetUID())] = true
		}
		if address.Name != l.ClusterIP.String() || address.Spec.ParentRef.Name != l.Name {
			t.Errorf("%s's address: %+v", l.Name, address)
		}
		if service.Name != l.Name || service.Spec.ClusterIP != l.ClusterIP.String() || service.Spec.ClusterIPs[0] != l.ClusterIP.String() || service.Spec.Ports[0].Port != port {
			t.Errorf("%s: %+v", l.Name, service)
		}
		if slice.Name != l.Name || slice.Labels[discoveryv1.LabelServiceName] != l.Name || len(slice.Endpoints) != len(l.Endpoints) {
			t.Errorf("%s's slice: %+v", l.Name, slice)
		}
		for i, e := range slice.Endpoints {
			if e.Addresses[0] != l.Endpoints[i].String() || e.NodeName == nil {
				t.Errorf("%s's endpoint %d: %+v", l.Name, i, e)
			}
		}
	}
	if len(uids) != 6 {
		t.Errorf("UIDs are shared: %v", uids)
	}
	for uid := range uids {
		if len(uid) != 36 || uid[14] != '4' || strings.Count(uid, "-") != 4 {
			t.Errorf("UID %q", uid)
		}
	}
	if err := p.service.decode([]byte(`{"kind":"Service"}`)); err == nil || !strings.Contains(err.Error(), "no protobuf") {
		t.Errorf("JSON in etcd: %v", err)
	}
}
