// SPDX-License-Identifier: Apache-2.0

// Package service_test is the table of Service tests: real sockets in network
// namespaces, through the mustang binary as a user runs it, for every way of
// connecting a pod, every way of doing Services, and both address families.
//
// MUSTANG_TEST_MODES (comma-separated) and MUSTANG_TEST_PATHS choose a part of
// the table; without them, a mode that the kernel lacks is skipped by name.
// MUSTANG_BIN names a binary instead of building one; see env_test.go for more.
package service_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/built"
)

const roleVariable = "MUSTANG_TEST_ROLE"

var tool string

func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) == "server" {
		serve()
		return
	}
	err := readEnvironment()
	dir := ""
	if err == nil {
		dir, err = os.MkdirTemp("", "mustang-service-test-")
	}
	if err == nil {
		tool, err = built.Binary(dir, "mustang", "MUSTANG_BIN")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "service tests:", err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func TestWhatIsRunIsAnInput(t *testing.T) { built.Declare(t, "mustang") }

// TestServices runs the whole table, then policies (which make a pod anew), then
// many connections: all in one world, because making one is most of the work
// where the machine is emulated. lab.Mustang is both of the other ways, so that
// only the table is its own.
func TestServices(t *testing.T) {
	for _, mode := range modes() {
		for _, path := range chosen(pathsVariable, lab.MustangTC, lab.MustangSocket, lab.Mustang) {
			t.Run(string(mode)+"/"+string(path), func(t *testing.T) {
				w := newWorld(t, mode, path)
				for _, part := range []struct {
					name string
					run  func(*world)
				}{{"", (*world).table}, {"policy", (*world).policies}, {"connections at once", (*world).connectionsAtOnce}} {
					if part.name != "" && path == lab.Mustang {
						continue
					}
					for _, family := range []string{"ipv4", "ipv6"} {
						t.Run(strings.TrimPrefix(part.name+"/"+family, "/"), func(t *testing.T) { part.run(w.on(t, family)) })
					}
				}
			})
		}
	}
}

func (w *world) table() {
	for _, c := range []struct {
		name string
		run  func(*world)
	}{
		{"tcp by pod address", (*world).tcpByPodAddress},
		{"tcp by Service, source kept, peer shown as the Service", (*world).tcpByService},
		{"bulk both ways arrives whole", (*world).bulk},
		{"every backend is used", (*world).everyBackend},
		{"udp connected and unconnected", (*world).udpByService},
		{"udp datagrams larger than the mtu", (*world).udpFragments},
		{"two Services, their backend itself, one udp socket", (*world).udpTwoServices},
		{"an IPv6 socket's tcp, by IPv4-mapped address too", (*world).mappedTCP},
		{"an IPv6 socket's udp, by IPv4-mapped address too", (*world).mappedUDP},
		{"sctp by Service", (*world).sctp},
		{"sctp by Service, of the node", (*world).sctpOfTheNode},
		{"hairpin", (*world).hairpin},
		{"echo by pod address", (*world).echo},
		{"closed port is refused at once", (*world).closedPort},
		{"a Service's unknown port is refused at once", (*world).unknownPort},
		{"a Service without backends refuses at once", (*world).noBackends},
		{"an unconnected udp socket is refused at once", (*world).unconnectedRefusals},
		{"node and pod reach each other", (*world).node},
		{"outside and pod reach each other", (*world).outside},
		{"source port reuse, Service and pod address in turn", (*world).portReuse},
		{"one source port, Service and pod address at once", (*world).portCollision},
		{"the path's mtu is found, by address and by Service", (*world).findsPathMTU},
		{"Service removed, others stay", (*world).removal},
	} {
		w.t.Run(c.name, func(t *testing.T) {
			sub := *w
			sub.t = t
			c.run(&sub)
		})
	}
}
