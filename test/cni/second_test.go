// SPDX-License-Identifier: Apache-2.0

package cni_test

// A second interface of another mode in one container, as Multus makes them:
// Services and policy hold on both.

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/test/built"
)

// pairs are first and second modes that this kernel has: each beside veth.
func pairs(t *testing.T) (out [][2]string) {
	for _, mode := range modesOnce(t) {
		switch mode {
		case "veth":
		case "host-device":
			t.Run(mode, func(t *testing.T) { t.Skip("a host's device leads to a wire of its own, where no other pod is") })
		default:
			out = append(out, [2]string{"veth", mode}, [2]string{mode, "veth"})
		}
	}
	return out
}

// twofold is a container with two interfaces.
type twofold struct {
	*container
	second *container
	conf   [2]config
	got    [2]answer
}

// labelled are the arguments that give a container a label.
func labelled(app string) map[string]any {
	return map[string]any{"cni": map[string]any{"labels": map[string]any{"app": app}}}
}

func (n *node) twofold(modes [2]string, servicePath, app string) *twofold {
	n.t.Helper()
	c := n.container()
	run(n.t, "ip", "-n", c.ns, "link", "set", "lo", "up") // as runtimes do
	x := &twofold{container: c, second: &container{node: n, id: c.id, ns: c.ns, ifname: "net1"}}
	for i, ipam := range []any{n.config(modes[0])["ipam"], map[string]any{"type": "mustang", "pools": []string{"10.19.0.0/24", "fd00:19::/64"}}} {
		x.conf[i] = n.config(modes[i]).with("ipam", ipam).with("servicePath", servicePath).with("args", labelled(app))
	}
	x.got[0] = c.add(x.conf[0])
	x.got[1] = x.second.add(x.conf[1])
	return x
}

func (x *twofold) check() {
	x.t.Helper()
	x.ok(x.call("CHECK", x.conf[0].prev(x.got[0])))
	x.ok(x.second.call("CHECK", x.conf[1].prev(x.got[1])))
}

func (x *twofold) del() {
	x.t.Helper()
	x.second.del(x.conf[1])
	x.ok(x.call("CHECK", x.conf[0].prev(x.got[0]))) // the other stays as it was
	x.container.del(x.conf[0])
}

func TestTwoInterfacesOfDifferentModesInOneContainer(t *testing.T) {
	for _, modes := range pairs(t) {
		for _, path := range []string{"both", "tc"} {
			t.Run(strings.Join(modes[:], "+")+"/"+path, func(t *testing.T) {
				n := newNode(t)
				server, friend, foe := n.twofold(modes, path, "server"), n.twofold(modes, path, "friend"), n.twofold(modes, path, "foe")
				server.server(":80")
				n.onlyTheFirstHasADefaultRoute(server)
				var doors []string // all ways to the server
				for i, a := range server.got {
					for j := range a.IPs {
						doors = append(doors, net.JoinHostPort(a.address(j), "80"))
						if i == 1 && path == "tc" {
							continue // the client comes by its first interface, and the answer would leave by the server's: docs/cni.md
						}
						service := net.JoinHostPort([]string{fmt.Sprintf("10.96.0.%d", 10+i), fmt.Sprintf("fd00:96::%d", 10+i)}[j], "80")
						n.tool("svc", "add", "--service", service, "--protocol", "tcp", "--backend", net.JoinHostPort(a.address(j), "80"))
						doors = append(doors, service)
					}
				}
				n.knock(doors, map[*container]bool{friend.container: true, foe.container: true})
				n.isolate("server", "friend")
				n.knock(doors, map[*container]bool{friend.container: true, foe.container: false})
				for _, x := range []*twofold{server, friend, foe} {
					x.check()
				}
				n.tool("policy", "rm", "default/server")
				for _, x := range []*twofold{server, friend, foe} {
					x.del()
				}
			})
		}
	}
}

// Routes to one network are the first interface's; each keeps the MTU that it has towards
// the node's pods, and the result says it.
func TestASecondInterfaceOfTheSamePoolLeavesTheFirstItsRoutes(t *testing.T) {
	for _, mode := range modesOnce(t) {
		if mode == "host-device" {
			continue // there is one device
		}
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			c, sibling := n.container(), n.container()
			second := &container{node: n, id: c.id, ns: c.ns, ifname: "net1"}
			conf := n.config(mode)
			a, b := c.add(conf), sibling.add(conf)
			leads := func() (out []string) {
				for i := range b.IPs {
					out = append(out, run(t, "ip", "-n", c.ns, "route", "get", b.address(i)))
				}
				return out
			}
			before := leads()
			x := second.add(conf)
			if d := cmp.Diff(before, leads()); d != "" {
				t.Errorf("with a second interface, a sibling is reached (-before, +now):\n%s", d)
			}
			second.ok(second.call("CHECK", conf.prev(x)))
			second.del(conf)
			if d := cmp.Diff(before, leads()); d != "" {
				t.Errorf("after the second interface, a sibling is reached (-before, +now):\n%s", d)
			}
			c.ok(c.call("CHECK", conf.prev(a)))
			c.del(conf)
			sibling.del(conf)
		})
	}
}

func TestASecondInterfacesNetworkKeepsItsLocalMTU(t *testing.T) {
	for _, mode := range modesOnce(t) {
		if !slices.Contains([]string{"veth", "netkit", "netkit-l3"}, mode) {
			continue // the network is the interface's own there
		}
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			x := n.twofold([2]string{mode, mode}, "both", "two")
			for family, network := range map[string]string{"-4": "10.19.0.0/24", "-6": "fd00:19::/64"} {
				if out := run(t, "ip", family, "-n", x.ns, "route", "show", network); !strings.Contains(out, "dev net1") || !strings.Contains(out, "mtu 65520") {
					t.Errorf("the route to %s is %q", network, out)
				}
				i := slices.IndexFunc(x.got[1].Routes, func(r route) bool { return r.Dst == network })
				if i < 0 || x.got[1].Routes[i].Mtu != 65520 {
					t.Errorf("the result says of %s: %s", network, x.got[1].stdout)
				}
			}
			x.check()
			x.del()
		})
	}
}

func (n *node) onlyTheFirstHasADefaultRoute(x *twofold) {
	n.t.Helper()
	for _, family := range []string{"-4", "-6"} {
		if routes := run(n.t, "ip", family, "-n", x.ns, "route", "show", "default"); strings.Count(routes, "\n") != 1 || !strings.Contains(routes, "dev eth0") {
			n.t.Errorf("the default route is not the first interface's alone:\n%s", routes)
		}
	}
}

// knock has containers ask at all doors, at once, and wants them let in or not.
func (n *node) knock(doors []string, allowed map[*container]bool) {
	n.t.Helper()
	var wg sync.WaitGroup
	for x, want := range allowed {
		for _, door := range doors {
			wg.Go(func() {
				wait := map[bool]time.Duration{true: patience, false: silence}[want]
				if out, err := n.dials(x.ns, door, wait); (err == nil && strings.HasPrefix(out, "hello")) != want {
					n.t.Errorf("%s at %s: let in is to be %v, and it said %q (%v)", x.id, door, want, out, err)
				}
			})
		}
	}
	wg.Wait()
}

// isolate lets pods of one label in to those of another, and nobody else.
func (n *node) isolate(app, friend string) {
	n.t.Helper()
	file := filepath.Join(n.dir, "policy.yaml")
	text := fmt.Sprintf(`apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: %s, namespace: default}
spec:
  podSelector: {matchLabels: {app: %s}}
  ingress: [{from: [{podSelector: {matchLabels: {app: %s}}}]}]
`, app, app, friend)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
	n.tool("policy", "apply", "-f", file)
}

var builtTool struct {
	sync.Once
	file string
	err  error
}

// tool runs mustang on the node.
func (n *node) tool(args ...string) string {
	n.t.Helper()
	out, err := n.toolCommand(args...).CombinedOutput()
	if err != nil {
		n.t.Fatalf("mustang %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// toolCommand is mustang on the node. MUSTANG_BIN names a binary instead of building one.
func (n *node) toolCommand(args ...string) *exec.Cmd {
	n.t.Helper()
	builtTool.Do(func() {
		builtTool.file, builtTool.err = built.Binary(filepath.Dir(binary), "mustang", "MUSTANG_BIN")
	})
	if builtTool.err != nil {
		n.t.Fatal(builtTool.err)
	}
	cmd := append([]string{"--net=/var/run/netns/" + n.name, builtTool.file, "--bpffs", filepath.Join(n.bpffs(), "scope"), "--state-dir", n.state()}, args...)
	return exec.Command("nsenter", cmd...)
}
