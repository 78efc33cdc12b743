// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/netns"
)

// Where not all addresses take node ports, flows wear one that does: answers to
// another would be taken for the node's own.
func TestFlowsWearAnAddressThatTakesNodePorts(t *testing.T) {
	w := newEdgeWorld(t)
	w.must(func(e *Engine) error {
		return e.SetEdge(Edge{Devices: []string{"w0", "w1"}, Prefixes: []netip.Prefix{
			netip.MustParsePrefix("198.51.101.0/24"), netip.MustParsePrefix("2001:db8:1::/64"),
		}})
	})
	w.serve(w.other, "other", 8080)
	w.replace([]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil)
	each(t, func(t *testing.T, network string, v6 bool) {
		to := map[bool]string{false: "198.51.101.1", true: "2001:db8:1::1"}[v6]
		name, saw, err := askFor(5*time.Second, w.client, network, netip.AddrPortFrom(netip.MustParseAddr(to), 30080).String())
		if err != nil || name != "other" || saw.String() != to {
			t.Errorf("%q saw %v, %v; want other, which sees %s", name, saw, err, to)
		}
	})
}

// An edge that gets other ports looks for the answers to flows that wear the old ones.
func TestFlowsOutliveTheEdgesPorts(t *testing.T) {
	w := newEdgeWorld(t)
	w.replace([]string{"198.51.101.9:8080"}, []string{"[2001:db8:1::9]:8080"}, nil)
	var l net.Listener
	var c net.Conn
	err := netns.Do(w.other, func() (err error) { l, err = net.Listen("tcp", ":8080"); return err })
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			s, err := l.Accept()
			if err != nil {
				return
			}
			go io.Copy(s, s)
		}
	}()
	err = netns.Do(w.client, func() (err error) { c, err = net.Dial("tcp", "198.51.100.1:30080"); return err })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	still := func(when string) {
		t.Helper()
		c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Write([]byte("?")); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
	}
	still("before")
	w.must(func(e *Engine) error {
		return e.SetEdge(Edge{Devices: []string{"w0", "w1"}, Host: true, Ports: PortRange{50000, 50099}})
	})
	still("with other ports")
}
