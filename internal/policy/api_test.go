// SPDX-License-Identifier: Apache-2.0

package policy_test

// A table for the API's text: each sentence with a policy and flows that it
// decides. What is planned and the oracle must both say so.

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/manifest"
	"github.com/mustang-net/mustang/internal/policy/oracle"
	"github.com/mustang-net/mustang/internal/policy/policygen"
	"github.com/mustang-net/mustang/internal/state"
)

// The table's pods: endpoints 1 to 4 are on this node.
var apiPods = []oracle.Pod{
	{Namespace: "a", Name: "web", Labels: map[string]string{"app": "web", "tier": "front"}, Addrs: both(1), Ports: ports("http", 80, "TCP", "dns", 53, "UDP")},
	{Namespace: "a", Name: "db", Labels: map[string]string{"app": "db"}, Addrs: both(2), Ports: ports("http", 8080, "", "dns", 54, "UDP")},
	{Namespace: "b", Name: "web", Labels: map[string]string{"app": "web"}, Addrs: both(3)},
	{Namespace: "b", Name: "bare", Addrs: both(4)},
	{Namespace: "c", Name: "far", Labels: map[string]string{"app": "far"}, Addrs: both(9)},
}

var apiNamespaces = map[string]map[string]string{
	"a": {policy.NamespaceName: "a", "team": "x"}, "b": {policy.NamespaceName: "b", "team": "green"}, "c": {policy.NamespaceName: "c"},
}

func both(n byte) []netip.Addr {
	return []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, n}), netip.AddrFrom16([16]byte{0: 0xfd, 15: n})}
}

func ports(list ...any) (out []corev1.ContainerPort) {
	for i := 0; i < len(list); i += 3 {
		out = append(out, corev1.ContainerPort{Name: list[i].(string), ContainerPort: int32(list[i+1].(int)), Protocol: corev1.Protocol(list[i+2].(string))})
	}
	return out
}

// A flow is "FROM>TO PROTOCOL/PORT", of namespace/pod, an address, node; with
// "~" before it, it must not pass.
var apiTable = []struct{ sentence, spec, flows string }{
	{"Traffic is allowed to a pod if there are no NetworkPolicies selecting the pod", `{podSelector: {matchLabels: {app: db}}}`,
		"b/web>a/web TCP/80, 198.51.100.1>a/web UDP/9, c/far>a/web icmp, ~b/web>a/db TCP/80"},
	{"OR if the traffic source is the pod's local node", `{podSelector: {}}`, "node>a/web TCP/80, node>a/db icmp, ~10.0.1.2>a/web TCP/80"},
	{"OR if the traffic matches at least one ingress rule across all of the NetworkPolicy objects whose podSelector matches the pod",
		`{podSelector: {}, ingress: [{ports: [{port: 80}]}]}
{podSelector: {matchLabels: {app: web}}, ingress: [{ports: [{port: 81}]}]}`,
		"b/web>a/web TCP/80, b/web>a/web TCP/81, ~b/web>a/web TCP/82, b/web>a/db TCP/80, ~b/web>a/db TCP/81"},
	{"If this field is empty then this NetworkPolicy does not allow any traffic", `{podSelector: {matchLabels: {app: web}}, ingress: []}`,
		"~a/db>a/web TCP/80, ~c/far>a/web UDP/53, ~198.51.100.1>a/web icmp, a/web>a/db TCP/80"},
	{"An empty selector matches all pods in the policy's namespace", `{podSelector: {}}`, "~c/far>a/web TCP/1, ~c/far>a/db TCP/1, c/far>b/web TCP/1"},
	{"This field is optional. If it is not specified, it defaults to an empty selector", `{policyTypes: [Ingress]}`, "~c/far>a/web TCP/1, ~c/far>a/db TCP/1, c/far>b/web TCP/1"},
	{"Outgoing traffic is allowed if there are no NetworkPolicies selecting the pod", `{podSelector: {matchLabels: {app: db}}, policyTypes: [Egress]}`,
		"a/web>b/web TCP/80, a/web>198.51.100.1 UDP/53, ~a/db>b/web TCP/80"},
	{"OR if the traffic matches at least one egress rule across all of the NetworkPolicy objects",
		`{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 198.51.100.0/24}}]}]}
{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{ports: [{port: 53, protocol: UDP}]}]}`,
		"a/web>198.51.100.1 TCP/80, a/web>203.0.113.1 UDP/53, ~a/db>203.0.113.1 UDP/53, a/db>198.51.100.7 UDP/53"},
	{"If this field is empty then this NetworkPolicy limits all outgoing traffic", `{podSelector: {}, policyTypes: [Egress], egress: []}`,
		"~a/web>a/db TCP/80, ~a/web>198.51.100.1 icmp, c/far>a/web TCP/80"},
	{"Both the egress of the source and the ingress of the destination must allow it",
		`{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{to: [{podSelector: {}}]}]}
{podSelector: {matchLabels: {app: db}}, ingress: [{ports: [{port: 80}]}]}`,
		"a/web>a/db TCP/80, ~a/web>a/db TCP/81, ~a/web>b/web TCP/80"},
	{"If policyTypes is not specified, policies that contain an egress section are assumed to affect egress, and all policies to affect ingress",
		`{podSelector: {matchLabels: {app: web}}, egress: [{ports: [{port: 53, protocol: UDP}]}]}`, "~c/far>a/web TCP/80, a/web>c/far UDP/53, ~a/web>c/far TCP/80"},
	{"and without an egress section they do not", `{podSelector: {matchLabels: {app: web}}, ingress: [{}]}`, "a/web>c/far TCP/80, c/far>a/web TCP/80"},
	{"an egress-only policy must explicitly specify policyTypes [ Egress ]", `{podSelector: {}, policyTypes: [Egress], egress: [{}]}`, "c/far>a/web TCP/80, a/web>c/far TCP/80"},
	{"policyTypes [ Ingress ] leaves egress alone, whatever rules there are", `{podSelector: {}, policyTypes: [Ingress], egress: [{ports: [{port: 1}]}]}`, "a/web>c/far TCP/80, ~c/far>a/web TCP/80"},
	{"The traffic must match both ports and from", `{podSelector: {}, ingress: [{ports: [{port: 80}], from: [{podSelector: {}}]}]}`,
		"a/db>a/web TCP/80, ~a/db>a/web TCP/81, ~b/web>a/web TCP/80"},
	{"Each item in this list (ports) is combined using a logical OR", `{podSelector: {}, ingress: [{ports: [{port: 80}, {port: 53, protocol: UDP}]}]}`,
		"c/far>a/web TCP/80, c/far>a/web UDP/53, ~c/far>a/web UDP/80, ~c/far>a/web TCP/53"},
	{"If ports is empty or missing, this rule matches all ports", `{podSelector: {}, ingress: [{from: [{podSelector: {}}], ports: []}]}`,
		"a/db>a/web TCP/1, a/db>a/web UDP/65535, a/db>a/web SCTP/9, a/db>a/web icmp"},
	{"If ports contains at least one item, traffic is allowed only if it matches at least one port", `{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`,
		"~c/far>a/web icmp, ~c/far>a/web TCP/79, c/far>a/web TCP/80"},
	{"Items in from are combined using a logical OR", `{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: db}}}, {ipBlock: {cidr: 198.51.100.0/24}}]}]}`,
		"a/db>a/web TCP/80, 198.51.100.9>a/web TCP/80, ~b/web>a/web TCP/80, ~198.51.101.9>a/web TCP/80"},
	{"If from is empty or missing, this rule matches all sources", `{podSelector: {}, ingress: [{from: [], ports: [{port: 80}]}]}`,
		"c/far>a/web TCP/80, 2001:db8::1>a/web TCP/80, ~c/far>a/web TCP/81"},
	{"protocol: if not specified, this field defaults to TCP", `{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`, "c/far>a/web TCP/80, ~c/far>a/web UDP/80, ~c/far>a/web SCTP/80"},
	{"protocol (TCP, UDP, or SCTP) which traffic must match", `{podSelector: {}, ingress: [{ports: [{port: 80, protocol: SCTP}]}]}`, "c/far>a/web SCTP/80, ~c/far>a/web TCP/80, ~c/far>a/web UDP/80"},
	{"port: if this field is not provided, this matches all port names and numbers", `{podSelector: {}, ingress: [{ports: [{protocol: UDP}]}]}`, "c/far>a/web UDP/1, c/far>a/web UDP/65535, ~c/far>a/web TCP/1"},
	{"port can be a named port on a pod: of the destination, each its own number", `{podSelector: {}, ingress: [{ports: [{port: http}]}]}`,
		"c/far>a/web TCP/80, ~c/far>a/web TCP/8080, c/far>a/db TCP/8080, ~c/far>a/db TCP/80, ~c/far>a/web UDP/80"},
	{"a named port needs the named protocol, too", `{podSelector: {}, ingress: [{ports: [{port: dns}]}, {ports: [{port: dns, protocol: UDP}]}]}`, "~c/far>a/web TCP/53, c/far>a/web UDP/53, c/far>a/db UDP/54, ~c/far>a/db UDP/53"},
	{"a named port in egress is the destination pod's", `{podSelector: {}, policyTypes: [Egress], egress: [{ports: [{port: http}]}]}`,
		"a/web>a/db TCP/8080, ~a/web>a/db TCP/80, ~a/web>b/web TCP/80, ~a/web>198.51.100.1 TCP/80"},
	{"a rule whose only port has a name that no pod has allows nothing", `{podSelector: {}, ingress: [{ports: [{port: nothing}]}]}`, "~c/far>a/web TCP/80, ~c/far>a/web icmp"},
	{"endPort indicates that the range of ports from port to endPort, inclusive, should be allowed", `{podSelector: {}, ingress: [{ports: [{port: 100, endPort: 1027}]}]}`,
		"c/far>a/web TCP/100, c/far>a/web TCP/1027, c/far>a/web TCP/512, ~c/far>a/web TCP/99, ~c/far>a/web TCP/1028"},
	{"IPBlock describes a particular CIDR that is allowed", `{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: '2001:db8::/64'}}]}]}`,
		"2001:db8::1>a/web TCP/80, ~2001:db8:0:1::1>a/web TCP/80, ~198.51.100.1>a/web TCP/80"},
	{"an IPv6 block that holds everything holds no IPv4", `{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: '::/0'}}]}]}`, "2001:db8::1>a/web TCP/80, ~198.51.100.1>a/web TCP/80, ::1:2:3>a/web TCP/80"},
	{"The except entry describes CIDRs that should not be included within this rule", `{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.8/30, 198.51.100.1/32]}}]}]}`,
		"198.51.100.2>a/web TCP/80, ~198.51.100.1>a/web TCP/80, ~198.51.100.9>a/web TCP/80, 198.51.100.12>a/web TCP/80"},
	{"an address that one block excepts and another holds is allowed", `{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.1/32]}}, {ipBlock: {cidr: 198.51.100.1/32}}]}]}`,
		"198.51.100.1>a/web TCP/80, 198.51.100.2>a/web TCP/80"},
	{"pods' addresses match blocks, too", `{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/24, except: [10.0.0.3/32]}}, {ipBlock: {cidr: 'fd00::/120', except: ['fd00::3/128']}}]}]}`, "c/far>a/web TCP/80, a/db>a/web TCP/80, ~b/web>a/web TCP/80"},
	{"and so do other nodes'", `{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.1.0/24}}]}]}`, "10.0.1.2>a/web TCP/80, ~c/far>a/web TCP/80"},
	{"podSelector: if present but empty, it selects all pods (of the policy's own namespace)", `{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}`, "a/db>a/web TCP/80, ~b/web>a/web TCP/80, ~198.51.100.1>a/web TCP/80"},
	{"If namespaceSelector is also set, it selects the pods matching podSelector in the namespaces selected", `{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: green}}, podSelector: {matchLabels: {app: web}}}]}]}`,
		"b/web>a/web TCP/80, ~b/bare>a/web TCP/80, ~a/db>a/web TCP/80"},
	{"as two items they are alternatives", `{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: green}}}, {podSelector: {matchLabels: {app: db}}}]}]}`,
		"b/web>a/web TCP/80, b/bare>a/web TCP/80, a/db>a/web TCP/80, ~c/far>a/web TCP/80"},
	{"namespaceSelector: if present but empty, it selects all namespaces", `{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}]}`, "c/far>a/web TCP/80, b/bare>a/web TCP/80, a/db>a/web TCP/80, ~198.51.100.1>a/web TCP/80"},
	{"Otherwise it selects all pods in the namespaces selected by namespaceSelector", `{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: c}}}]}]}`, "c/far>a/web TCP/80, ~b/web>a/web TCP/80"},
	{"matchLabels and matchExpressions are ANDed", `{podSelector: {matchLabels: {app: web}, matchExpressions: [{key: tier, operator: Exists}]}}`, "~c/far>a/web TCP/80, c/far>a/db TCP/80"},
	{"operator In", `{podSelector: {matchExpressions: [{key: app, operator: In, values: [web, cache]}]}}`, "~c/far>a/web TCP/80, c/far>a/db TCP/80"},
	{"operator NotIn selects what does not have the label, too", `{podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [web]}]}}]}]}`,
		"b/bare>a/web TCP/80, c/far>a/web TCP/80, ~b/web>a/web TCP/80"},
	{"operator Exists", `{podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: app, operator: Exists}]}}]}]}`, "b/web>a/web TCP/80, ~b/bare>a/web TCP/80"},
	{"operator DoesNotExist", `{podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: app, operator: DoesNotExist}]}}]}]}`, "b/bare>a/web TCP/80, ~b/web>a/web TCP/80"},
	{"a pod cannot block access to itself", `{podSelector: {}, policyTypes: [Ingress, Egress]}`, "a/web>a/web TCP/80, ~a/web>a/db TCP/80"},
}

func TestEachSentenceOfTheAPI(t *testing.T) {
	for _, c := range apiTable {
		t.Run(c.sentence, func(t *testing.T) {
			w := oracle.World{Pods: apiPods, Namespaces: apiNamespaces}
			m := policy.New(plenty)
			feedAPI(m)
			for i, spec := range strings.Split(c.spec, "\n") {
				var p networkingv1.NetworkPolicy
				if err := yaml.UnmarshalStrict([]byte("{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {namespace: a, name: p"+string(rune('0'+i))+"}, spec: "+spec+"}"), &p); err != nil {
					t.Fatal(err)
				}
				w.Policies = append(w.Policies, p)
				made, err := manifest.Policy(&p)
				if err != nil {
					t.Fatal(err)
				}
				m.SetPolicy(made)
			}
			tab := newTables()
			tab.apply(m.Plan())
			for _, text := range strings.Split(c.flows, ", ") {
				flow, want := strings.TrimPrefix(text, "~"), !strings.HasPrefix(text, "~")
				for _, c := range apiCases(t, flow) {
					planned := tab.verdict(c) == ""
					said := (c.From < 0 || w.Egress(apiPods[c.From], c.Flow)) && (c.To < 0 || w.Ingress(apiPods[c.To], c.Flow))
					if planned != want || said != want {
						t.Errorf("%s (%s to %s): planned %v, the oracle says %v, want %v", flow, c.Src, c.Dst, planned, said, want)
					}
				}
			}
		})
	}
}

// Pods and their namespace are told by different watches. Before the namespace, and
// after it, nobody knows which labels it is without.
func TestANamespaceThatIsNotKnownLacksNoLabel(t *testing.T) {
	for spec, without := range map[string]bool{ // whether c/far is selected while c is not known
		"{matchExpressions: [{key: team, operator: NotIn, values: [red]}]}":                      false,
		"{matchExpressions: [{key: team, operator: DoesNotExist}]}":                              false,
		"{matchExpressions: [{key: kubernetes.io/metadata.name, operator: NotIn, values: [b]}]}": true,
		"{matchLabels: {kubernetes.io/metadata.name: c}}":                                        true,
		"{}": true,
	} {
		var p networkingv1.NetworkPolicy
		if err := yaml.UnmarshalStrict([]byte("{metadata: {namespace: a, name: p}, spec: {podSelector: {}, ingress: [{from: [{namespaceSelector: "+spec+", podSelector: {matchLabels: {app: far}}}]}]}}"), &p); err != nil {
			t.Fatal(err)
		}
		made, err := manifest.Policy(&p)
		if err != nil {
			t.Fatal(err)
		}
		m := policy.New(plenty)
		feedAPI(m)
		m.Watched()
		m.SetPolicy(made)
		tab := newTables()
		allows := func(when string, want bool) {
			t.Helper()
			tab.apply(m.Plan())
			for _, c := range apiCases(t, "c/far>a/web TCP/80") {
				if got := tab.verdict(c) == ""; got != want {
					t.Errorf("%s, %s: allowed: %v, want %v", spec, when, got, want)
				}
			}
		}
		allows("known, without the label", true)
		m.DeleteNamespace(state.OwnerCLI, "c")
		allows("not known any more", without)
		m.SetNamespace(state.OwnerKubernetes, "c", map[string]string{policy.NamespaceName: "c"})
		allows("known again", true)
	}
}

// A pod is made anew under its name, in the node's namespace, while the one before it
// still has its interface.
func TestAnInterfaceIsNoHostNetworkPods(t *testing.T) {
	m := policy.New(plenty)
	feedAPI(m)
	m.SetPod(policy.Pod{Key: policy.Key{Namespace: "a", Name: "web"}, HostNetwork: true})
	if c := m.Plan(); c.Put.Endpoints[1] != policy.Unknown {
		t.Errorf("the interface has %+v, want it closed", c.Put.Endpoints[1])
	}
	if _, known := m.Selecting(1, policy.Ingress); known {
		t.Error("its pod is said to be known")
	}
}

// A pod is made anew under its name, elsewhere maybe and with other labels, while the one before
// it runs on: deleted by force, or replaced so.
func TestAnInterfaceIsNoLaterPodsOfItsName(t *testing.T) {
	m := policy.New(plenty)
	key := policy.Key{Namespace: "a", Name: "web-0", Owner: state.OwnerKubernetes}
	was, is, client := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.2.0.1"), policy.Key{Namespace: "a", Name: "client"}
	pod := policy.Pod{Key: key, UID: "first", Labels: map[string]string{"app": "web"}, Addrs: []netip.Addr{was}}
	web := policy.Selector{{Key: "app", Operator: policy.In, Values: []string{"web"}}}
	m.SetPod(policy.Pod{Key: client})
	m.SetEndpoint(policy.Endpoint{ID: 9, Pod: client})
	m.SetPolicy(policy.Policy{Key: client, IsolatesIngress: true, Ingress: []policy.Rule{{Peers: []policy.Peer{{Pods: &web}}}}})
	m.SetPod(pod)
	m.SetEndpoint(policy.Endpoint{ID: 1, Pod: key, UID: "first", Addrs: pod.Addrs})
	now := newTables()
	look := func(when string, endpoint uint32, a netip.Addr, known bool) {
		t.Helper()
		now.apply(m.Plan())
		if closed := now.Endpoints[endpoint] == policy.Unknown; closed == known {
			t.Errorf("%s: the interface has %+v", when, now.Endpoints[endpoint])
		}
		if named := now.Identities[a].Pod != 0; named != known {
			t.Errorf("%s: %s has %+v", when, a, now.Identities[a])
		}
	}
	look("at first", 1, was, true)
	pod.UID, pod.Addrs = "second", nil
	m.SetPod(pod)
	look("the second is made", 1, was, false)
	m.SetEndpoint(policy.Endpoint{ID: 2, Pod: key, UID: "second", Addrs: []netip.Addr{is}})
	look("the second is here", 2, is, true)
	look("the second is here", 1, was, false)
	if _, known := m.Selecting(1, policy.Ingress); known {
		t.Error("the first is said to be known")
	}
	pod.StaticUID = "first" // the kubelet's own name for it
	m.SetPod(pod)
	look("a mirror", 1, was, true)
	m.DeleteEndpoint(1)
	look("the first goes", 2, is, true)
	if now.Identities[was].Pod != 0 {
		t.Errorf("%s has %+v", was, now.Identities[was])
	}
}

func feedAPI(m *policy.Model) {
	m.SetNode([]netip.Addr{policygen.NodeAddr(false), policygen.NodeAddr(true)})
	for name, labels := range apiNamespaces {
		m.SetNamespace(state.OwnerCLI, name, labels)
	}
	for i, p := range apiPods {
		out := policy.Pod{Key: policy.Key{Namespace: p.Namespace, Name: p.Name}, Labels: p.Labels, Addrs: p.Addrs}
		for _, c := range p.Ports {
			protocol, _ := manifest.Protocol(c.Protocol)
			out.Ports = append(out.Ports, policy.NamedPort{Name: c.Name, Protocol: protocol, Number: uint16(c.ContainerPort)})
		}
		m.SetPod(out)
		if i < 4 {
			m.SetEndpoint(policy.Endpoint{ID: uint32(i + 1), Pod: out.Key, Addrs: p.Addrs})
		}
	}
}

// apiCases is a flow in each family that its ends have.
func apiCases(t *testing.T, text string) (out []policygen.Case) {
	ends, service, _ := strings.Cut(text, " ")
	from, to, ok := strings.Cut(ends, ">")
	protocol, number, _ := strings.Cut(service, "/")
	numbers := map[string]uint8{"TCP": 6, "UDP": 17, "SCTP": 132, "icmp": 1}
	if !ok || numbers[protocol] == 0 {
		t.Fatalf("flow %q is not FROM>TO PROTOCOL/PORT", text)
	}
	for family := range 2 {
		src, a := apiEnd(t, from, family)
		dst, b := apiEnd(t, to, family)
		if !src.IsValid() || !dst.IsValid() {
			continue
		}
		c := policygen.Case{From: a, To: b, Number: numbers[protocol]}
		c.Src, c.Dst, c.FromNode = src, dst, from == "node"
		if protocol != "icmp" {
			c.Protocol = corev1.Protocol(protocol)
			port := netip.MustParseAddrPort("1.1.1.1:" + number)
			c.Port = port.Port()
		}
		// A block of one family decides nothing about the other.
		out = append(out, c)
	}
	if len(out) == 0 {
		t.Fatalf("flow %q has ends of different families", text)
	}
	return out
}

func apiEnd(t *testing.T, name string, family int) (netip.Addr, int) {
	if name == "node" {
		return policygen.NodeAddr(family == 1), -1
	}
	for i, p := range apiPods {
		if name == p.Namespace+"/"+p.Name {
			if i >= 4 {
				return p.Addrs[family], -1
			}
			return p.Addrs[family], i
		}
	}
	a, err := netip.ParseAddr(name)
	if err != nil {
		t.Fatal(err)
	}
	if a.Is6() != (family == 1) {
		return netip.Addr{}, -1
	}
	return a, -1
}
