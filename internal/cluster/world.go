// SPDX-License-Identifier: Apache-2.0

package cluster

// The objects that the connectivity test makes: a namespace with servers and
// clients on two nodes, from mustang's own image, which every node has.

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/mustang-net/mustang/internal/cluster/peer"
)

// world is what there is to ask and to be asked.
type world struct {
	c         *Cluster
	namespace string
	image     string
	nodes     []corev1.Node // one, or two
	pods      map[string]*corev1.Pod
	services  map[string]*corev1.Service
}

const readyIn = 2 * time.Minute

// podSpec is one of the test's pods.
type podSpec struct {
	name, role string
	node       int
	host       bool // in the node's own namespace: it only asks
}

// specs are the pods: by their names, here is the first node and there the second.
func (w *world) specs() []podSpec {
	all := []podSpec{
		{"client", "friend", 0, false}, {"stranger", "stranger", 0, false}, {"server-here", "here", 0, false}, {"host-here", "", 0, true},
		{"server-there", "there", 1, false}, {"host-there", "", 1, true},
	}
	return slices.DeleteFunc(all, func(p podSpec) bool { return p.node >= len(w.nodes) })
}

func (w *world) path(rest string) string { return "/api/v1/namespaces/" + w.namespace + rest }

// build makes everything and waits until the pods are ready.
func (w *world) build(ctx context.Context) error {
	if err := w.makeNamespace(ctx); err != nil {
		return err
	}
	for _, s := range w.specs() {
		pod := w.pod(s)
		if err := w.makePod(ctx, pod); err != nil {
			return err
		}
		w.pods[s.name] = pod
	}
	for name, role := range map[string]string{"here": "here", "there": "there"} {
		svc := service(name, role)
		if err := w.c.api.Create(ctx, w.path("/services"), svc); err != nil {
			return err
		}
		w.services[name] = svc
	}
	return w.wait(ctx)
}

// makeNamespace makes the namespace. Its name is known before the answer comes, and whoever
// interrupts waits for that: what was made is removed, whether or not anybody heard of it.
func (w *world) makeNamespace(ctx context.Context) error {
	w.namespace = "mustang-connectivity-" + strings.ToLower(rand.Text()[:8])
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace, Labels: map[string]string{
		"app.kubernetes.io/name": "mustang-connectivity", "pod-security.kubernetes.io/enforce": "privileged"}}}
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), known)
	defer cancel()
	err := w.c.api.Create(whole, "/api/v1/namespaces", ns)
	if refused := apierrors.APIStatus(nil); errors.As(err, &refused) && refused.Status().Code < http.StatusInternalServerError {
		w.namespace = "" // none was made; one of this name is somebody else's
	}
	return err
}

// makePod waits for the namespace's service account, which comes a moment after
// the namespace.
func (w *world) makePod(ctx context.Context, pod *corev1.Pod) (err error) {
	for deadline := time.Now().Add(known); ; {
		if err = w.c.api.Create(ctx, w.path("/pods"), pod); err == nil || time.Now().After(deadline) || !pause(ctx, 100*time.Millisecond) {
			return err
		}
	}
}

func (w *world) pod(s podSpec) *corev1.Pod {
	yes, no, grace := true, false, int64(0)
	args := []string{"connectivity", "serve"}
	if s.host {
		args = append(args, "--silent") // the node's own ports are not ours to take
	}
	c := corev1.Container{Name: "peer", Image: w.image, ImagePullPolicy: corev1.PullIfNotPresent, Args: args,
		SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
			Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}}
	if !s.host {
		c.ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(peer.Port)}}}
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: s.name, Labels: map[string]string{"role": s.role}},
		Spec: corev1.PodSpec{NodeName: w.nodes[s.node].Name, HostNetwork: s.host, TerminationGracePeriodSeconds: &grace, AutomountServiceAccountToken: &no,
			EnableServiceLinks: &no, Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, Containers: []corev1.Container{c}},
	}
}

func service(name, role string) *corev1.Service {
	both := corev1.IPFamilyPolicyPreferDualStack
	port := func(p corev1.Protocol) corev1.ServicePort {
		return corev1.ServicePort{Name: string(p[0]|0x20) + "port", Protocol: p, Port: 80, TargetPort: intstr.FromInt32(peer.Port)}
	}
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, IPFamilyPolicy: &both,
		Selector: map[string]string{"role": role}, Ports: []corev1.ServicePort{port(corev1.ProtocolTCP), port(corev1.ProtocolUDP)}}}
}

// wait waits until the pods are ready.
func (w *world) wait(ctx context.Context) error {
	long, cancel := context.WithTimeout(ctx, readyIn)
	defer cancel()
	for {
		var list corev1.PodList
		if err := w.c.api.Get(long, w.path("/pods"), &list); err != nil {
			return err
		}
		var waiting []string
		for i := range list.Items {
			p := &list.Items[i]
			w.pods[p.Name] = p
			if !isReady(p) {
				waiting = append(waiting, p.Name+" on "+p.Spec.NodeName+because(p))
			}
		}
		if len(waiting) == 0 {
			return nil
		}
		if !pause(long, 200*time.Millisecond) {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("pods are not ready after %v: %s", readyIn, strings.Join(waiting, ", "))
		}
	}
}

// because is why a pod is not ready, as far as Kubernetes says, in brackets; "" where it does not.
func because(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && w.Reason != "" {
			return " (" + strings.TrimSuffix(w.Reason+": "+w.Message, ": ") + ")"
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Status == corev1.ConditionFalse && c.Message != "" {
			return " (" + c.Message + ")"
		}
	}
	return ""
}

// pause is false when ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// remove deletes the namespace, and waits until nothing of it is left. It works
// also when ctx has ended.
func (w *world) remove() error {
	if w.namespace == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	path := "/api/v1/namespaces/" + w.namespace
	if err := w.c.api.Delete(ctx, path); err != nil {
		return err
	}
	for {
		if there, err := w.c.api.Exists(ctx, path); err == nil && !there {
			return nil
		}
		if !pause(ctx, 200*time.Millisecond) {
			return errors.New("namespace " + w.namespace + " is still being deleted after two minutes; see to it: kubectl get namespace " + w.namespace + " -o yaml")
		}
	}
}

// guard lets only friends reach the server here.
func (w *world) guard(ctx context.Context) error {
	port := intstr.FromInt32(peer.Port)
	tcp, udp := corev1.ProtocolTCP, corev1.ProtocolUDP
	return w.c.api.Create(ctx, "/apis/networking.k8s.io/v1/namespaces/"+w.namespace+"/networkpolicies", &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "friends-only"},
		Spec: networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "role", Operator: metav1.LabelSelectorOpIn, Values: []string{"here", "there"}}}},
			Ingress: []networkingv1.NetworkPolicyIngressRule{{
				From:  []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"role": "friend"}}}},
				Ports: []networkingv1.NetworkPolicyPort{{Protocol: &tcp, Port: &port}, {Protocol: &udp, Port: &port}},
			}}},
	})
}

// ip is a pod's address of a family; invalid: it has none.
func (w *world) ip(pod string, v4 bool) netip.Addr {
	for _, ip := range w.pods[pod].Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil && a.Is4() == v4 {
			return a
		}
	}
	return netip.Addr{}
}

// clusterIP is a Service's address of a family.
func (w *world) clusterIP(name string, v4 bool) netip.Addr {
	for _, ip := range w.services[name].Spec.ClusterIPs {
		if a, err := netip.ParseAddr(ip); err == nil && a.Is4() == v4 {
			return a
		}
	}
	return netip.Addr{}
}

// nodeIP is the n-th node's address of a family.
func (w *world) nodeIP(n int, v4 bool) netip.Addr {
	for _, a := range addressesOf(w.nodes[n]) {
		if a.Is4() == v4 {
			return a
		}
	}
	return netip.Addr{}
}
