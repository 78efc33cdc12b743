// SPDX-License-Identifier: Apache-2.0

package agent_test

// Services and their endpoints, as the API server has them.

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

const (
	servicesPath = "/api/v1/namespaces/default/services"
	slicesPath   = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
)

// service is a Service with one address of each family and TCP and UDP on port
// 80, or as fn changes it.
func service(name string, n int, fn func(*corev1.Service)) *corev1.Service {
	both := corev1.IPFamilyPolicyRequireDualStack
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.ServiceSpec{
			ClusterIP: vip4(n).String(), ClusterIPs: []string{vip4(n).String(), vip6(n).String()}, IPFamilyPolicy: &both,
			Ports: []corev1.ServicePort{{Name: "t", Port: 80, Protocol: corev1.ProtocolTCP}, {Name: "u", Port: 80, Protocol: corev1.ProtocolUDP}},
		},
	}
	if fn != nil {
		fn(s)
	}
	return s
}

func vip4(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 97, byte(n >> 8), byte(n)}) }

func vip6(n int) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x10, 0, 0x96, 14: byte(n >> 8), 15: byte(n)})
}

func at(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, 80) }

// endpoints are the slices of a Service, one a family.
func endpoints(name string, pods ...*lab.Pod) []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		tcp, udp, port := corev1.ProtocolTCP, corev1.ProtocolUDP, int32(serverPort)
		t, u, here := "t", "u", nodeName
		s := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: name + "-" + strings.ToLower(string(family)), Namespace: "default",
				Labels: map[string]string{discoveryv1.LabelServiceName: name},
			},
			AddressType: family,
			Ports:       []discoveryv1.EndpointPort{{Name: &t, Port: &port, Protocol: &tcp}, {Name: &u, Port: &port, Protocol: &udp}},
			Endpoints:   []discoveryv1.Endpoint{},
		}
		for _, p := range pods {
			a := p.IPv4
			if family == discoveryv1.AddressTypeIPv6 {
				a = p.IPv6
			}
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a.String()}, NodeName: &here})
		}
		out = append(out, s)
	}
	return out
}

// put creates or replaces objects.
func (w *world) put(objects ...any) {
	w.t.Helper()
	must(w.t, w.tryPut(objects...))
}

func (w *world) tryPut(objects ...any) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, o := range objects {
		path, name := servicesPath, ""
		switch o := o.(type) {
		case *corev1.Service:
			name = o.Name
		case *discoveryv1.EndpointSlice:
			path, name = slicesPath, o.Name
		case *networkingv1.NetworkPolicy:
			path, name = policiesPath(o.Namespace), o.Name
		case []*discoveryv1.EndpointSlice:
			for _, s := range o {
				if err := w.tryPut(s); err != nil {
					return err
				}
			}
			continue
		}
		err := w.api.Do(ctx, http.MethodPut, path+"/"+name, o, nil)
		if status := (*kube.StatusError)(nil); errors.As(err, &status) && (status.Code == http.StatusNotFound || status.Code == http.StatusUnprocessableEntity) {
			err = w.api.Do(ctx, http.MethodPost, path, o, nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *world) remove(services ...string) {
	w.t.Helper()
	for _, name := range services {
		must(w.t, w.tryRemove(name))
	}
}

// tryRemove removes a Service and its slices; what is absent is no error.
func (w *world) tryRemove(name string) error {
	for _, path := range []string{servicesPath + "/" + name, slicesPath + "/" + name + "-ipv4", slicesPath + "/" + name + "-ipv6"} {
		err := w.api.Do(context.Background(), http.MethodDelete, path, nil, nil)
		if status := (*kube.StatusError)(nil); err != nil && !(errors.As(err, &status) && status.Code == http.StatusNotFound) {
			return err
		}
	}
	return nil
}
