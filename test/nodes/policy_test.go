// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/mustang-net/mustang/lab"
)

// TestPolicyBetweenNodes: the receiver's node decides about pods of another, by
// the pod's address and through a Service, however nodes are joined.
func TestPolicyBetweenNodes(t *testing.T) {
	for _, join := range []lab.Join{{Mode: "direct", HostRouting: "ebpf"}, {Mode: "direct", HostRouting: "legacy"},
		{Mode: "vxlan", HostRouting: "ebpf"}, {Mode: "vxlan", HostRouting: "legacy"}} {
		t.Run(join.Mode+"/"+join.HostRouting, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, join)
			friend, foe := w, w.by(podPlace(w.near))
			w.policy(fmt.Sprintf("[{from: [{ipBlock: {cidr: %s/32}}, {ipBlock: {cidr: %s/128}}]}]", w.client.IPv4, w.client.IPv6))
			for _, ipv6 := range families {
				friend.on(t, ipv6).tcp(w.far, friend.on(t, ipv6).direct(w.far))
				friend.on(t, ipv6).tcp(w.far, friend.on(t, ipv6).vip(w.far))
				foe.on(t, ipv6).shutOut(foe.on(t, ipv6).direct(w.far))
				foe.on(t, ipv6).shutOut(foe.on(t, ipv6).vip(w.far))
			}
			w.policy("[]")
			for _, ipv6 := range families {
				friend.on(t, ipv6).shutOut(friend.on(t, ipv6).direct(w.far))
			}
		})
	}
}

// policy isolates the far pod, but for these rules.
func (w *world) policy(ingress string) {
	w.t.Helper()
	file := filepath.Join(w.t.TempDir(), "policy.yaml")
	text := "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: far, namespace: default}\n" +
		"spec: {podSelector: {}, policyTypes: [Ingress], ingress: " + ingress + "}\n"
	w.must(os.WriteFile(file, []byte(text), 0o600))
	w.mustang(w.lab.Nodes()[1], "policy", "apply", "-f", file)
}

// shutOut wants no connection to come to be within what several tries take.
func (w *world) shutOut(at netip.AddrPort) {
	w.t.Helper()
	if c, err := w.dialWith(net.Dialer{Timeout: slow(1200 * time.Millisecond)}, "tcp", at); err == nil {
		c.Close()
		w.t.Errorf("%s came to %s", w.from.name, at)
	}
}
