// SPDX-License-Identifier: Apache-2.0

package k8s

// A row for each sentence of the Service API and of EndpointSlices that says
// what a proxy must do: objects in, desired Service out.

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/state"
)

// node is the one that everything is translated for.
const node = "n1"

func service(t *testing.T, text string) *Service {
	t.Helper()
	return readService(parse[corev1.Service](t, text))
}

func slice(t *testing.T, text string) *Slice {
	t.Helper()
	return readSlice(parse[discoveryv1.EndpointSlice](t, text))
}

func parse[T any](t *testing.T, text string) *T {
	t.Helper()
	var o T
	if err := yaml.UnmarshalStrict([]byte(text), &o); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return &o
}

func frontend(kind state.FrontendKind, addr string) state.ServiceFrontend {
	return state.ServiceFrontend{Kind: kind, AddrPort: netip.MustParseAddrPort(addr)}
}

func backend(addr string) state.ServiceBackend {
	return state.ServiceBackend{AddrPort: netip.MustParseAddrPort(addr), Ready: true, Serving: true}
}

func local(addr string) state.ServiceBackend {
	b := backend(addr)
	b.Node, b.Local = node, true
	return b
}

const (
	plainSpec  = "clusterIP: 10.96.0.7\n  clusterIPs: [10.96.0.7]\n  ports: [{port: 80, protocol: TCP}]"
	plainSlice = "addressType: IPv4\nports: [{name: '', port: 8080, protocol: TCP}]\n"
)

// spec is a Service with this spec.
func spec(fields string) string { return "metadata: {name: web, namespace: shop}\nspec:\n  " + fields }

// of is a slice of that Service.
func of(fields string) string {
	return "metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}\n" + fields
}

// want is the Service that plainSpec comes to, changed by fn.
func want(fn func(*state.Service)) *state.Service {
	s := &state.Service{
		ServiceID: state.ServiceID{Owner: state.OwnerKubernetes, Namespace: "shop", Name: "web"},
		Ports:     []state.ServicePort{{Protocol: state.TCP, Frontends: []state.ServiceFrontend{frontend(state.ClusterIP, "10.96.0.7:80")}}},
	}
	if fn != nil {
		fn(s)
	}
	return s
}

func wantFrontends(list ...state.ServiceFrontend) *state.Service {
	return want(func(s *state.Service) { s.Ports[0].Frontends = list })
}

func wantBackends(list ...state.ServiceBackend) *state.Service {
	return want(func(s *state.Service) { s.Ports[0].Backends = list })
}

var sentences = []struct {
	says    string
	service string
	slices  []string
	want    *state.Service // nil: nothing of ours
	problem string         // a part of the only one; "": none
}{
	{says: "a Service without endpoints has its frontends", service: spec(plainSpec), want: want(nil)},
	{says: "headless: no address, nothing to translate", service: spec("clusterIP: None\n  clusterIPs: [None]\n  ports: [{port: 80}]")},
	{says: "ExternalName is an alias of DNS", service: spec("type: ExternalName\n  externalName: example.org")},
	{says: "ExternalName that was of another type, and has its address still", service: spec("type: ExternalName\n  externalName: example.org\n  " + plainSpec)},
	{says: "a Service without an address yet", service: spec("ports: [{port: 80}]")},
	{
		says:    "service-proxy-name: another proxy serves it, whatever its value",
		service: "metadata: {name: web, namespace: shop, labels: {service.kubernetes.io/service-proxy-name: ''}}\nspec:\n  " + plainSpec,
	},
	{
		says:    "called headless by its label, though it has an address",
		service: "metadata: {name: web, namespace: shop, labels: {service.kubernetes.io/headless: ''}}\nspec:\n  " + plainSpec,
	},
	{says: "written before dual stack: clusterIP alone", service: spec("clusterIP: 10.96.0.7\n  ports: [{port: 80}]"), want: want(nil)},
	{
		says:    "dual stack: each port has an address of both families, and each endpoint goes by its own",
		service: spec("clusterIP: 10.96.0.7\n  clusterIPs: [10.96.0.7, 'fd00:96::7']\n  ports: [{port: 80}]"),
		slices: []string{
			of(plainSlice + "endpoints: [{addresses: [10.1.0.1]}]"),
			of("addressType: IPv6\nports: [{name: '', port: 8080, protocol: TCP}]\nendpoints: [{addresses: ['fd00::1']}]"),
		},
		want: want(func(s *state.Service) {
			s.Ports[0].Frontends = append(s.Ports[0].Frontends, frontend(state.ClusterIP, "[fd00:96::7]:80"))
			s.Ports[0].Backends = []state.ServiceBackend{backend("10.1.0.1:8080"), backend("[fd00::1]:8080")}
		}),
	},
	{
		says:    "several ports: endpoints by the port's name and protocol",
		service: spec("clusterIP: 10.96.0.7\n  clusterIPs: [10.96.0.7]\n  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]"),
		slices: []string{of("addressType: IPv4\nports: [{name: dns, port: 5353, protocol: UDP}, {name: dns-tcp, port: 5354, protocol: TCP}, {name: dns, port: 9, protocol: TCP}]\n" +
			"endpoints: [{addresses: [10.1.0.1]}]")},
		want: want(func(s *state.Service) {
			front := []state.ServiceFrontend{frontend(state.ClusterIP, "10.96.0.7:53")}
			s.Ports = []state.ServicePort{
				{Name: "dns", Protocol: state.UDP, Frontends: front, Backends: []state.ServiceBackend{backend("10.1.0.1:5353")}},
				{Name: "dns-tcp", Protocol: state.TCP, Frontends: front, Backends: []state.ServiceBackend{backend("10.1.0.1:5354")}},
			}
		}),
	},
	{
		says:    "a named target port may be another number in each slice",
		service: spec(plainSpec),
		slices: []string{
			of(plainSlice + "endpoints: [{addresses: [10.1.0.1]}]"),
			of("addressType: IPv4\nports: [{name: '', port: 9090, protocol: TCP}]\nendpoints: [{addresses: [10.1.0.2]}]"),
		},
		want: wantBackends(backend("10.1.0.1:8080"), backend("10.1.0.2:9090")),
	},
	{says: "a slice's port that is nil is no port", service: spec(plainSpec), slices: []string{of("addressType: IPv4\nports: [{name: ''}]\nendpoints: [{addresses: [10.1.0.1]}]")}, want: want(nil)},
	{says: "a slice of names is not for a proxy", service: spec(plainSpec), slices: []string{of("addressType: FQDN\nports: [{name: '', port: 80}]\nendpoints: [{addresses: [example.org]}]")}, want: want(nil)},
	{
		says: "all addresses of an endpoint are one place: the first is taken", service: spec(plainSpec),
		slices: []string{of(plainSlice + "endpoints: [{addresses: [10.1.0.1, 10.1.0.2]}]")}, want: wantBackends(backend("10.1.0.1:8080")),
	},
	{
		says: "an endpoint's node is told, and whether it is this one", service: spec(plainSpec),
		slices: []string{of(plainSlice + "endpoints: [{addresses: [10.1.0.1], nodeName: n1}]")}, want: wantBackends(local("10.1.0.1:8080")),
	},
	{
		says: "nil conditions: ready, serving, not terminating", service: spec(plainSpec),
		slices: []string{of(plainSlice + "endpoints: [{addresses: [10.1.0.1], conditions: {ready: false}}, {addresses: [10.1.0.2]}]")},
		want:   wantBackends(state.ServiceBackend{AddrPort: netip.MustParseAddrPort("10.1.0.1:8080"), Serving: true}, backend("10.1.0.2:8080")),
	},
	{
		says: "a terminating endpoint that serves is told as such", service: spec(plainSpec),
		slices: []string{of(plainSlice + "endpoints: [{addresses: [10.1.0.1], conditions: {ready: false, serving: true, terminating: true}}]")},
		want:   wantBackends(state.ServiceBackend{AddrPort: netip.MustParseAddrPort("10.1.0.1:8080"), Serving: true, Terminating: true}),
	},
	{
		says: "an endpoint in two slices while it moves counts once, in its better condition", service: spec(plainSpec),
		slices: []string{
			of(plainSlice + "endpoints: [{addresses: [10.1.0.1], conditions: {ready: false}}, {addresses: [10.1.0.2]}]"),
			of(plainSlice + "endpoints: [{addresses: [10.1.0.1]}, {addresses: [10.1.0.2], conditions: {ready: false}}]"),
		},
		want: wantBackends(backend("10.1.0.1:8080"), backend("10.1.0.2:8080")),
	},
	{
		says: "of an endpoint that two slices have alike, what says that it is here counts", service: spec(plainSpec),
		slices: []string{
			of(plainSlice + "endpoints: [{addresses: [10.1.0.1]}, {addresses: [10.1.0.2], nodeName: n1}]"),
			of(plainSlice + "endpoints: [{addresses: [10.1.0.1], nodeName: n1}, {addresses: [10.1.0.2]}]"),
		},
		want: wantBackends(local("10.1.0.1:8080"), local("10.1.0.2:8080")),
	},
	{
		says: "one that serves while it terminates is better than one that is not ready", service: spec(plainSpec),
		slices: []string{
			of(plainSlice + "endpoints: [{addresses: [10.1.0.1], conditions: {ready: false}}]"),
			of(plainSlice + "endpoints: [{addresses: [10.1.0.1], conditions: {ready: false, terminating: true}}]"),
		},
		want: wantBackends(state.ServiceBackend{AddrPort: netip.MustParseAddrPort("10.1.0.1:8080"), Serving: true, Terminating: true}),
	},
	{
		says: "publishNotReadyAddresses is the slice controller's: it writes ready", service: spec(plainSpec + "\n  publishNotReadyAddresses: true"),
		slices: []string{of(plainSlice + "endpoints: [{addresses: [10.1.0.1], conditions: {ready: true, serving: false}}]")},
		want:   wantBackends(state.ServiceBackend{AddrPort: netip.MustParseAddrPort("10.1.0.1:8080"), Ready: true}),
	},
	{
		says: "hints for zones and nodes are told", service: spec(plainSpec + "\n  trafficDistribution: PreferClose"),
		slices: []string{of(plainSlice + "endpoints: [{addresses: [10.1.0.1], hints: {forZones: [{name: a}], forNodes: [{name: n2}]}}]")},
		want: want(func(s *state.Service) {
			s.TrafficDistribution = "PreferClose"
			b := backend("10.1.0.1:8080")
			b.ForZones, b.ForNodes = []string{"a"}, []string{"n2"}
			s.Ports[0].Backends = []state.ServiceBackend{b}
		}),
	},
	{
		says: "externalIPs belong to any type; those of another family are not its", service: spec(plainSpec + "\n  externalIPs: [198.51.100.1, 'fd00:e::1']"),
		want: wantFrontends(frontend(state.ClusterIP, "10.96.0.7:80"), frontend(state.ExternalIP, "198.51.100.1:80")),
	},
	{
		says: "NodePort: the port on the node's addresses, in the families of the Service", service: spec("type: NodePort\n  clusterIP: 10.96.0.7\n  clusterIPs: [10.96.0.7, 'fd00:96::7']\n  ports: [{port: 80, nodePort: 30080}]"),
		want: wantFrontends(frontend(state.ClusterIP, "10.96.0.7:80"), frontend(state.ClusterIP, "[fd00:96::7]:80"),
			frontend(state.NodePort, "0.0.0.0:30080"), frontend(state.NodePort, "[::]:30080")),
	},
	{
		says:    "LoadBalancer: addresses of ipMode VIP, and of none, are the node's to answer; those of Proxy and names are not",
		service: spec("type: LoadBalancer\n  "+plainSpec) + "\nstatus: {loadBalancer: {ingress: [{ip: 203.0.113.1}, {ip: 203.0.113.2, ipMode: VIP}, {ip: 203.0.113.3, ipMode: Proxy}, {hostname: lb.example}]}}",
		want:    wantFrontends(frontend(state.ClusterIP, "10.96.0.7:80"), frontend(state.LoadBalancer, "203.0.113.1:80"), frontend(state.LoadBalancer, "203.0.113.2:80")),
	},
	{
		says:    "allocateLoadBalancerNodePorts false: no node port",
		service: spec("type: LoadBalancer\n  allocateLoadBalancerNodePorts: false\n  " + plainSpec), want: want(nil),
	},
	{
		says: "the status of what is no LoadBalancer any more counts for nothing", service: spec(plainSpec) + "\nstatus: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}",
		want: want(nil),
	},
	{
		says:    "loadBalancerSourceRanges, with and without space",
		service: spec("type: LoadBalancer\n  loadBalancerSourceRanges: [' 192.0.2.0/24 ', 'fd00:2::/64']\n  " + plainSpec),
		want: want(func(s *state.Service) {
			s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("fd00:2::/64")}
		}),
	},
	{
		says: "an external IP that is the load balancer's, too, has its source ranges",
		service: spec("type: LoadBalancer\n  externalIPs: [203.0.113.1, 198.51.100.1]\n  loadBalancerSourceRanges: [192.0.2.0/24]\n  "+plainSpec) +
			"\nstatus: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}",
		want: want(func(s *state.Service) {
			s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
			s.Ports[0].Frontends = append(s.Ports[0].Frontends, frontend(state.ExternalIP, "198.51.100.1:80"), frontend(state.LoadBalancer, "203.0.113.1:80"))
		}),
	},
	{
		says: "and is closed with it",
		service: spec("type: LoadBalancer\n  externalIPs: [203.0.113.1]\n  loadBalancerSourceRanges: [everybody]\n  "+plainSpec) +
			"\nstatus: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}",
		want: want(nil), problem: `"everybody" is not a network`,
	},
	{
		says:    "a source range that cannot be read closes the load balancer's addresses and nothing else",
		service: spec("type: LoadBalancer\n  loadBalancerSourceRanges: [everybody]\n  "+plainSpec) + "\nstatus: {loadBalancer: {ingress: [{ip: 203.0.113.1}]}}",
		want:    want(nil), problem: `"everybody" is not a network`,
	},
	{
		says:    "externalTrafficPolicy Local with its health check",
		service: spec("type: LoadBalancer\n  externalTrafficPolicy: Local\n  healthCheckNodePort: 32000\n  " + plainSpec),
		want:    want(func(s *state.Service) { s.External, s.HealthCheckNodePort = state.PolicyLocal, 32000 }),
	},
	{
		says:    "without the policy Local nobody asks about its health",
		service: spec("type: LoadBalancer\n  healthCheckNodePort: 32000\n  " + plainSpec), want: want(nil),
	},
	{
		says: "an endpoint without an address is none", service: spec(plainSpec),
		slices: []string{of(plainSlice + "endpoints: [{addresses: []}, {addresses: [10.1.0.2]}]")}, want: wantBackends(backend("10.1.0.2:8080")),
	},
	{
		says:    "internalTrafficPolicy Local",
		service: spec("internalTrafficPolicy: Local\n  " + plainSpec), want: want(func(s *state.Service) { s.Internal = state.PolicyLocal }),
	},
	{
		says:    "sessionAffinity ClientIP lasts three hours unless told",
		service: spec("sessionAffinity: ClientIP\n  " + plainSpec), want: want(func(s *state.Service) { s.Affinity = 3 * time.Hour }),
	},
	{
		says:    "sessionAffinityConfig gives the time",
		service: spec("sessionAffinity: ClientIP\n  sessionAffinityConfig: {clientIP: {timeoutSeconds: 7}}\n  " + plainSpec),
		want:    want(func(s *state.Service) { s.Affinity = 7 * time.Second }),
	},
	{
		says:    "a protocol that is not served is named; the other ports are served",
		service: spec("clusterIP: 10.96.0.7\n  clusterIPs: [10.96.0.7]\n  ports: [{name: s, port: 9, protocol: DCCP}, {port: 80}]"),
		want:    want(nil), problem: "protocol DCCP",
	},
	{
		says:    "one port of two protocols: each has the endpoints of its own",
		service: spec("type: NodePort\n  clusterIP: 10.96.0.7\n  clusterIPs: [10.96.0.7]\n  ports: [{port: 80}, {name: s, port: 80, protocol: SCTP, nodePort: 30080}]"),
		slices: []string{of("addressType: IPv4\nports: [{name: '', port: 8080, protocol: TCP}, {name: s, port: 2905, protocol: SCTP}]\n" +
			"endpoints: [{addresses: [10.1.0.2]}]")},
		want: want(func(s *state.Service) {
			s.Ports[0].Backends = []state.ServiceBackend{backend("10.1.0.2:8080")}
			s.Ports = append(s.Ports, state.ServicePort{Name: "s", Protocol: state.SCTP,
				Frontends: []state.ServiceFrontend{frontend(state.ClusterIP, "10.96.0.7:80"), frontend(state.NodePort, "0.0.0.0:30080")},
				Backends:  []state.ServiceBackend{backend("10.1.0.2:2905")}})
		}),
	},
	{
		says: "an endpoint that cannot be reached is named; the others are used", service: spec(plainSpec),
		slices: []string{of(plainSlice + "endpoints: [{addresses: [10.1.0.300]}, {addresses: [127.0.0.1]}, {addresses: [10.1.0.2]}]")},
		want:   wantBackends(backend("10.1.0.2:8080")), problem: "10.1.0.300",
	},
	{
		says: "an endpoint of another family than its slice's is named", service: spec(plainSpec),
		slices: []string{of(plainSlice + "endpoints: [{addresses: ['fd00::1']}]")}, want: want(nil), problem: "addressType",
	},
}

func TestServiceAPI(t *testing.T) {
	for _, c := range sentences {
		t.Run(c.says, func(t *testing.T) {
			s := service(t, c.service)
			problems := s.Problems
			var slices []*Slice
			for _, text := range c.slices {
				one := slice(t, text)
				problems = append(problems, one.Problems...)
				slices = append(slices, one)
			}
			got, ok := Translate(Key{"shop", "web"}, s, slices, node)
			switch {
			case ok != (c.want != nil):
				t.Fatalf("wants something: %v; %+v", ok, got)
			case ok:
				opts := cmp.Options{cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
					cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })}
				if diff := cmp.Diff(*c.want, got, opts); diff != "" {
					t.Errorf("- want, + got:\n%s", diff)
				}
			}
			all := strings.Join(problems, "\n")
			if (c.problem == "") != (all == "") || !strings.Contains(all, c.problem) {
				t.Errorf("problems: %q; want one with %q", all, c.problem)
			}
		})
	}
}

// The API bounds neither the external addresses of a Service nor its ports, and each pair of them is a frontend.
func TestMoreExternalAddressesThanThereMayBe(t *testing.T) {
	o := &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}}}
	for i := range 1000 {
		o.Spec.Ports = append(o.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(1 + i)})
	}
	for i := range 30000 {
		o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}).String())
	}
	o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	s := readService(o)
	got, ok := Translate(Key{"shop", "web"}, s, nil, node)
	kinds := map[state.FrontendKind]int{}
	for _, p := range got.Ports {
		for _, f := range p.Frontends {
			kinds[f.Kind]++
		}
	}
	want := map[state.FrontendKind]int{state.ClusterIP: 1000, state.LoadBalancer: 1000, state.ExternalIP: 15000}
	if diff := cmp.Diff(want, kinds); !ok || diff != "" {
		t.Errorf("frontends, - want, + got:\n%s", diff)
	}
	if len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "spec.externalIPs has 30000 addresses") {
		t.Errorf("problems: %.300q", s.Problems)
	}
}

// A node's addresses are those that Kubernetes takes for its host-network pods.
func TestAddressesOfNodes(t *testing.T) {
	for status, want := range map[string]string{
		"[{type: InternalIP, address: 192.0.2.1}, {type: Hostname, address: n1}, {type: ExternalIP, address: 198.51.100.1}]":          "[192.0.2.1]",
		"[{type: ExternalIP, address: 198.51.100.1}, {type: ExternalIP, address: 'fd00::1'}]":                                         "[198.51.100.1 fd00::1]",
		"[{type: ExternalIP, address: 'fd00::1'}, {type: InternalIP, address: 'fd00::9'}, {type: ExternalIP, address: 198.51.100.1}]": "[fd00::9]",
		"[{type: Hostname, address: n1}]": "[]",
	} {
		n := readNode(parse[corev1.Node](t, "metadata: {name: n1}\nstatus: {addresses: "+status+"}"))
		if got := fmt.Sprint(n.Addrs); got != want || len(n.Problems) > 0 {
			t.Errorf("%s: %s, want %s; %q", status, got, want, n.Problems)
		}
	}
}

// Written before dual stack, a node names the first of its networks alone.
func TestNetworksOfNodes(t *testing.T) {
	for spec, want := range map[string]string{
		"{}":                       "[]",
		"{podCIDR: 10.244.1.0/24}": "[10.244.1.0/24]",
		"{podCIDR: 10.244.1.0/24, podCIDRs: [10.244.1.0/24, 'fd00:1::/64']}": "[10.244.1.0/24 fd00:1::/64]",
	} {
		n := readNode(parse[corev1.Node](t, "metadata: {name: n1}\nspec: "+spec))
		if got := fmt.Sprint(n.PodCIDRs); got != want || len(n.Problems) > 0 {
			t.Errorf("%s: %s, want %s; %q", spec, got, want, n.Problems)
		}
	}
	if n := readNode(parse[corev1.Node](t, "metadata: {name: n1}\nspec: {podCIDRs: [10.244.1.0]}")); len(n.Problems) != 1 || !strings.Contains(n.Problems[0], "spec.podCIDRs") {
		t.Errorf("a network without its length: %q", n.Problems)
	}
}
