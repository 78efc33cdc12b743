// SPDX-License-Identifier: Apache-2.0

package service_test

// NetworkPolicy with real sockets: by pod address and through Services, in
// every mode, and while it changes.

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mustang-net/mustang/lab"
)

func (w *world) policies() {
	for _, c := range []struct {
		name string
		run  func(*world)
	}{
		{"an isolated pod is closed to all but its node", (*world).policyDenyIngress},
		{"ingress by label and port", (*world).policyIngress},
		{"ingress by block and exception", (*world).policyBlock},
		{"egress sees the backend, not the Service", (*world).policyEgress},
		{"a change cuts established flows, and heals them", (*world).policyCuts},
		{"nothing passes from the first instant", (*world).policyFirstInstant},
		{"echo and errors of allowed flows", (*world).policyICMP},
	} {
		w.t.Run(c.name, func(t *testing.T) {
			sub := *w
			sub.t = t
			c.run(&sub)
			sub.removePolicies()
		})
	}
}

// apply gives specs (of policies called p0, p1, …) to the tool.
func (w *world) apply(specs ...string) {
	w.t.Helper()
	var doc strings.Builder
	for i, s := range specs {
		fmt.Fprintf(&doc, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p%d}\nspec: %s\n", i, s)
	}
	file := filepath.Join(w.t.TempDir(), "policy.yaml")
	w.must(os.WriteFile(file, []byte(doc.String()), 0o600))
	_, err := w.lab.Node().Mustang(context.Background(), "policy", "apply", "-f", file)
	w.must(err)
}

func (w *world) removePolicies() {
	w.t.Helper()
	for _, name := range []string{"p0", "p1"} {
		w.lab.Node().Mustang(context.Background(), "policy", "rm", name) // one may not be there
	}
	out, err := w.lab.Node().Mustang(context.Background(), "policy", "ls", "-o", "json")
	w.must(err)
	if s := strings.TrimSpace(string(out)); s != "[]" {
		w.t.Fatalf("policies remain: %s", s)
	}
}

// space is where a client can be: a pod, or the node.
type space interface{ Do(func() error) error }

// silence is how long something that must not pass is waited for, hundreds of
// times as long as an answer takes.
const silence = 100 * time.Millisecond

// reach asks a server, and says whether it answered in time.
func reach(from space, network string, dst netip.AddrPort, wait time.Duration) bool {
	var c net.Conn
	err := from.Do(func() (err error) {
		c, err = net.DialTimeout(network, dst.String(), wait)
		return err
	})
	if err != nil {
		return false
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(wait))
	if _, err := io.WriteString(c, "who\n"); err != nil {
		return false
	}
	n, err := c.Read(make([]byte, 200))
	return err == nil && n > 0
}

// passes and blocked hold TCP and UDP to what must be.
func (w *world) passes(from space, dst netip.AddrPort) {
	w.t.Helper()
	for _, network := range []string{"tcp", "udp"} {
		if !reach(from, network, dst, patience) {
			w.t.Errorf("%s to %s does not pass, and should", network, dst)
		}
	}
}

func (w *world) blocked(from space, dst netip.AddrPort) {
	w.t.Helper()
	var both sync.WaitGroup
	for _, network := range []string{"tcp", "udp"} {
		both.Go(func() {
			if reach(from, network, dst, slow(silence)) {
				w.t.Errorf("%s to %s passes, and should not", network, dst)
			}
		})
	}
	both.Wait()
}

func (w *world) policyDenyIngress() {
	w.passes(w.client, w.direct(0))
	w.apply(`{podSelector: {matchLabels: {app: server0}}}`)
	w.blocked(w.client, w.direct(0))
	w.blocked(w.client, w.twin()) // its only backend is that pod
	w.passes(w.client, w.direct(1))
	w.passes(w.lab.Node(), w.direct(0))
	w.passes(w.servers[0], w.direct(1)) // egress is not isolated, and answers come back
	w.passes(w.servers[0], w.direct(0)) // nobody is kept from himself
}

func (w *world) policyIngress() {
	allow := func(peer, port string) string {
		return `{podSelector: {matchLabels: {app: server0}}, ingress: [{from: [{podSelector: ` + peer + `}], ports: ` + port + `}]}`
	}
	w.apply(allow("{matchLabels: {app: client}}", "[{port: 8080}, {port: 8080, protocol: UDP}]"))
	w.passes(w.client, w.direct(0))
	w.passes(w.client, w.twin())
	w.blocked(w.servers[1], w.direct(0))
	w.blocked(w.servers[1], w.twin())
	w.apply(allow("{matchLabels: {app: client}}", "[{port: 8000, endPort: 8079}, {port: 8081, endPort: 9000, protocol: UDP}]"))
	w.blocked(w.client, w.direct(0))
	w.apply(allow("{}", "[{port: 8000, endPort: 9000}, {port: 8000, endPort: 9000, protocol: UDP}]"))
	w.passes(w.client, w.direct(0))
	w.passes(w.servers[1], w.twin())
}

func (w *world) policyBlock() {
	a := address(w.client, w.ipv6)
	wide, one := netip.PrefixFrom(a, a.BitLen()-8).Masked(), netip.PrefixFrom(a, a.BitLen())
	block := func(b string) string {
		return `{podSelector: {matchLabels: {app: server0}}, ingress: [{from: [{ipBlock: ` + b + `}]}]}`
	}
	w.apply(block(fmt.Sprintf("{cidr: '%s'}", wide)))
	w.passes(w.client, w.direct(0))
	w.apply(block(fmt.Sprintf("{cidr: '%s', except: ['%s']}", wide, one)))
	w.blocked(w.client, w.direct(0))
	w.passes(w.servers[1], w.direct(0))
	w.apply(block(fmt.Sprintf("{cidr: '%s'}", one)))
	w.passes(w.client, w.twin())
	w.blocked(w.servers[1], w.direct(0))
}

func (w *world) policyEgress() {
	w.apply(`{podSelector: {matchLabels: {app: client}}, policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {app: server0}}}]}]}`)
	w.passes(w.client, w.twin())
	w.passes(w.client, w.direct(0))
	w.blocked(w.client, w.direct(1))
	w.passes(w.servers[0], w.direct(1))
	// The Service's own address is allowed, and its backend is not.
	w.apply(fmt.Sprintf(`{podSelector: {matchLabels: {app: client}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: '%s'}}]}]}`,
		netip.PrefixFrom(vip(w.ipv6), vip(w.ipv6).BitLen())))
	w.blocked(w.client, w.twin())
}

// policyCuts holds connections of both kinds open over changes.
func (w *world) policyCuts() {
	closed := `{podSelector: {matchLabels: {app: server0}}}`
	for _, dst := range []netip.AddrPort{w.direct(0), w.twin()} {
		tcp, err := dial(w.client, "tcp", dst, 0)
		w.must(err)
		defer tcp.Close()
		udp, err := dial(w.client, "udp", dst, 0)
		w.must(err)
		defer udp.Close()
		for name, c := range map[string]net.Conn{"tcp": tcp, "udp": udp} {
			if !answers(c, patience) {
				w.t.Fatalf("%s to %s: no answer before the change", name, dst)
			}
		}
		w.apply(closed)
		for name, c := range map[string]net.Conn{"tcp": tcp, "udp": udp} {
			if answers(c, slow(silence)) {
				w.t.Errorf("%s to %s: still answered after the pod was isolated", name, dst)
			}
		}
		w.removePolicies()
		for name, c := range map[string]net.Conn{"tcp": tcp, "udp": udp} {
			eventually(w.t, name+" goes on when it may again", func() bool { return answers(c, slow(silence)) })
		}
	}
}

func answers(c net.Conn, wait time.Duration) bool {
	c.SetDeadline(time.Now().Add(wait))
	if _, err := io.WriteString(c, "who\n"); err != nil {
		return false
	}
	n, err := c.Read(make([]byte, 2000))
	return err == nil && n > 0
}

// policyFirstInstant takes a pod's interface away and makes it again, under
// fire from and to it, with a policy that denies both.
func (w *world) policyFirstInstant() {
	p := w.servers[1]
	w.apply(`{podSelector: {matchLabels: {app: server1}}, policyTypes: [Ingress, Egress]}`)
	in, out := w.listenUDP(p), w.listenUDP(w.client)
	var arrived, sent atomic.Int64
	stop := make(chan struct{})
	defer close(stop)
	for _, x := range []struct {
		to   net.PacketConn
		from net.PacketConn
		at   netip.Addr
	}{{in, w.listenUDP(w.client), address(p, w.ipv6)}, {out, w.listenUDP(p), address(w.client, w.ipv6)}} {
		go hammer(x.from, netip.AddrPortFrom(x.at, plain(x.to.LocalAddr()).Port()), stop, &sent)
		go count(x.to, &arrived)
	}
	ctx := context.Background()
	for range 3 {
		w.again(ctx, p, "--labels=app=server1")
		before := sent.Load()
		eventually(w.t, "packets are sent", func() bool { return sent.Load() > before+100 })
	}
	if n := arrived.Load(); n > 0 {
		w.t.Errorf("%d of %d datagrams passed that policy denies", n, sent.Load())
	}
	w.removePolicies()
	eventually(w.t, "without the policy they pass", func() bool { return arrived.Load() > 0 })
}

// again makes a pod's interface anew, in its old namespace.
func (w *world) again(ctx context.Context, p *lab.Pod, flags ...string) {
	w.t.Helper()
	_, err := w.lab.Node().Mustang(ctx, "pod", "rm", p.Name)
	w.must(err)
	_, err = w.lab.Node().Mustang(ctx, append(w.lab.Node().PodArgs(p), flags...)...)
	w.must(err)
}

func hammer(from net.PacketConn, dst netip.AddrPort, stop chan struct{}, sent *atomic.Int64) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		from.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(dst)) // there may be no interface yet
		sent.Add(1)
		time.Sleep(100 * time.Microsecond)
	}
}

func count(u net.PacketConn, arrived *atomic.Int64) {
	buf := make([]byte, 100)
	for {
		if _, _, err := u.ReadFrom(buf); err != nil {
			return
		}
		arrived.Add(1)
	}
}

// policyICMP: an answer and an error of a flow that is allowed pass, whatever
// rules there are for their own direction.
func (w *world) policyICMP() {
	w.apply(`{podSelector: {matchLabels: {app: client}}, policyTypes: [Ingress]}`,
		`{podSelector: {matchLabels: {app: server0}}, policyTypes: [Egress]}`)
	ping := func(from *lab.Pod, to netip.Addr, seconds int) error {
		return exec.Command("nsenter", "--net="+from.NetNS, "ping", "-c", "1", "-W", strconv.Itoa(seconds), to.String()).Run()
	}
	if err := ping(w.client, address(w.servers[0], w.ipv6), 30*slowness); err != nil {
		w.t.Errorf("the answer to an echo does not pass: %v", err)
	}
	if err := ping(w.servers[0], address(w.client, w.ipv6), 1); err == nil {
		w.t.Error("an echo passes that nothing allows")
	}
	c, err := dial(w.client, "udp", netip.AddrPortFrom(address(w.servers[0], w.ipv6), 9), 0)
	w.must(err)
	defer c.Close()
	io.WriteString(c, "x")
	if _, err := c.Read(make([]byte, 1)); !refused(err) {
		w.t.Errorf("the error about a closed port does not pass: %v", err)
	}
}
