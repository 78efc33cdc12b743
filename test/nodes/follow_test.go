// SPDX-License-Identifier: Apache-2.0

package nodes_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// follow lets a node follow its devices, as its agent does, until the test ends.
func (w *world) follow(n *lab.Node) {
	w.t.Helper()
	cmd := n.Command(context.Background(), n.MustangArgs("node", "sync", "--follow")...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	w.must(cmd.Start())
	w.t.Cleanup(func() {
		cmd.Cancel()
		stuck := time.AfterFunc(patience, func() { cmd.Process.Signal(unix.SIGQUIT) }) // it says where it is
		if err := cmd.Wait(); !stuck.Stop() {
			w.t.Errorf("who follows the devices of %s did not end: %v\n%s", n.Name, err, errs.String())
		} else if err != nil || errs.Len() > 0 {
			w.t.Logf("following the devices of %s: %v\n%s", n.Name, err, errs.String())
		}
	})
}

// reaches says whether a new connection to the far pod is answered.
func (w *world) reaches() bool {
	var err error
	w.must(w.client.Do(func() error {
		d := net.Dialer{Timeout: time.Second}
		c, e := d.Dial("tcp", w.direct(w.far).String())
		if err = e; e == nil {
			c.Close()
		}
		return nil
	}))
	return err == nil
}

// forwarded is what a node's forward hook counts from now on.
func (w *world) forwarded(n *lab.Node) func() string {
	w.t.Helper()
	_ = n.Command(deadline(w.t), "nft", "delete", "table", "inet", "see").Run() // there may be none
	w.run(&n.Space, "nft add table inet see")
	w.run(&n.Space, "nft add chain inet see f { type filter hook forward priority 0 ; }")
	w.run(&n.Space, "nft add rule inet see f counter")
	return func() string {
		if f := w.run(&n.Space, "nft list chain inet see f"); !strings.Contains(f, "packets 0 ") {
			return f
		}
		return ""
	}
}

// address gives a node its addresses on the wire.
func (w *world) address(n *lab.Node) {
	w.t.Helper()
	w.run(&n.Space, "ip link set %s up", lab.Wire)
	w.run(&n.Space, "ip addr replace %s dev %s", netip.PrefixFrom(n.Wire4, lab.NodesCIDR4.Bits()), lab.Wire)
	w.run(&n.Space, "ip addr replace %s dev %s nodad", netip.PrefixFrom(n.Wire6, lab.NodesCIDR6.Bits()), lab.Wire)
}

// A NIC that gets another MTU, is restarted, or comes back as another: nobody
// has to say so.
func TestNodesFollowTheirDevices(t *testing.T) {
	for _, mode := range []string{"direct", "vxlan"} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t, lab.Config{}, lab.Join{Mode: mode, HostRouting: "ebpf"})
			nodes := w.lab.Nodes()
			for _, n := range nodes {
				w.follow(n)
			}
			less := map[string]int{"direct": 0, "vxlan": 50}[mode]
			for _, mtu := range []int{1400, 1500} {
				for _, n := range nodes {
					w.run(&n.Space, "ip link set %s mtu %d", lab.Wire, mtu)
				}
				want := mtu - less
				if want == 1500 {
					want = 0 // the interface's own
				}
				for family, ipv6 := range families {
					eventually(t, fmt.Sprintf("%s: pods are told of MTU %d", family, mtu), func() bool { return w.on(t, ipv6).routeMTU() == want })
				}
			}
			first, second := nodes[0], nodes[1]
			for what, change := range map[string]func(){
				"restarted": func() {
					w.run(&first.Space, "ip link set %s down", lab.Wire)
					w.address(first) // IPv6 addresses went with it
				},
				"another": func() {
					w.run(&first.Space, "ip link del %s", lab.Wire)
					w.run(&first.Space, "ip link add %s type veth peer name %[1]s netns %s", lab.Wire, filepath.Base(second.NetNS))
					w.address(first)
					w.address(second)
				},
			} {
				change()
				for family, ipv6 := range families {
					sub := w.on(t, ipv6)
					eventually(t, fmt.Sprintf("%s: the far pod is reached by the NIC that was %s", family, what), sub.reaches)
				}
				eventually(t, "the stack forwards nothing", func() bool {
					var seen []func() string
					for _, n := range nodes {
						seen = append(seen, w.forwarded(n))
					}
					for _, ipv6 := range families {
						w.on(t, ipv6).tcp(w.far, w.on(t, ipv6).direct(w.far))
					}
					return seen[0]()+seen[1]() == ""
				})
			}
		})
	}
}

// Without anybody who follows, the user may say so.
func TestNodeSyncAfterAChange(t *testing.T) {
	w := newWorld(t, lab.Config{}, lab.Join{Mode: "vxlan", HostRouting: "ebpf"})
	first := w.lab.Nodes()[0]
	if out := w.mustang(first, "node", "sync"); out != "" {
		t.Errorf("nothing has changed, and it says %q", out)
	}
	w.run(&first.Space, "ip link set %s mtu 1400", lab.Wire)
	w.statusSays(first, "`mustang node sync` tells them anew")
	if out := w.mustang(first, "node", "sync"); out != "brought up to date\n" || w.routeMTU() != 1350 {
		t.Errorf("it says %q, and the route's MTU is %d", out, w.routeMTU())
	}
}
