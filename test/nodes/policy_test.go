// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/mustang-net/mustang/lab"
)

// The receiver's node decides about pods of another, by the pod's address and
// through a Service, however nodes are joined.
func (w *world) policyOfTheReceiver() {
	w.t.Helper()
	friend, foe := w, w.by(podPlace(w.near))
	both := func(who *world, address func(*world, *lab.Pod) netip.AddrPort) []netip.AddrPort {
		return []netip.AddrPort{address(who.on(w.t, false), w.far), address(who.on(w.t, true), w.far)}
	}
	w.policy(fmt.Sprintf("[{from: [{ipBlock: {cidr: %s/32}}, {ipBlock: {cidr: %s/128}}]}]", w.client.IPv4, w.client.IPv6))
	for _, ipv6 := range families {
		sub := friend.on(w.t, ipv6)
		sub.tcp(w.far, sub.direct(w.far))
		sub.tcp(w.far, sub.vip(w.far))
	}
	foe.shutOut(append(both(foe, (*world).direct), both(foe, (*world).vip)...))
	w.policy("[]")
	friend.shutOut(both(friend, (*world).direct))
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

// shutOut wants no connection to come to be, to any of them, within what several
// tries take.
func (w *world) shutOut(from []netip.AddrPort) {
	w.t.Helper()
	var all sync.WaitGroup
	for _, at := range from {
		all.Go(func() {
			if c, err := w.dialWith(net.Dialer{Timeout: slow(1200 * time.Millisecond)}, "tcp", at); err == nil {
				c.Close()
				w.t.Errorf("%s came to %s", w.from.name, at)
			}
		})
	}
	all.Wait()
}
