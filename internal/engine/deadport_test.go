// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// runtimesPod is a pod at 10.9.0.addr that a runtime has made; die takes its namespace away, as nobody's DEL does.
func (n *node) runtimesPod(name string, addr int) (ep state.Endpoint, die func()) {
	n.t.Helper()
	space := n.name + "-" + name
	n.run("ip netns add %s", space)
	n.t.Cleanup(func() { exec.Command("ip", "netns", "del", space).Run() })
	n.run("ip link add h%s type veth peer name eth0 netns %s && ip link set h%s up", name, space, name)
	n.run("ip -n %s link set eth0 up && ip -n %s addr add 10.9.0.%d/32 dev eth0", space, space, addr)
	n.must(func(e *Engine) (err error) {
		ep, err = e.AddEndpoint(context.Background(), EndpointSpec{Netns: netns.Path(space), IfName: "eth0", Owner: state.OwnerCNI})
		return err
	})
	return ep, func() { n.t.Helper(); n.run("ip netns del %s", space) }
}

func portOf(addr int) HostPort {
	return HostPort{Protocol: state.TCP, HostPort: 8000, Pod: netip.MustParseAddrPort(fmt.Sprintf("10.9.0.%d:8080", addr))}
}

// Who gets the address of a pod that died without a DEL does not get what came by its host ports.
func TestADeadPodsHostPortsCloseBeforeAnotherHasItsAddress(t *testing.T) {
	n := newNode(t)
	_, die := n.runtimesPod("a", 2)
	n.must(func(e *Engine) error { return e.AddHostPorts(portOf(2)) })
	die()
	b, _ := n.runtimesPod("b", 2)
	if list := n.services(); len(list) > 0 {
		t.Errorf("the node's port leads to the pod that has the address now: %+v", list)
	}
	if list := n.endpoints(); len(list) != 1 || list[0].Netns != b.Netns {
		t.Errorf("the endpoints are %+v", list)
	}
}

// A pod that died without a DEL holds no host port; one that is there does, and so does one that this process does not see.
func TestADeadPodHoldsNoHostPort(t *testing.T) {
	n := newNode(t)
	dead, die := n.runtimesPod("a", 2)
	lives, _ := n.runtimesPod("b", 3)
	n.must(func(e *Engine) error { return e.AddHostPorts(portOf(2)) })
	taken := func(why string) {
		t.Helper()
		if err := n.do(func(e *Engine) error { return e.AddHostPorts(portOf(3)) }); !errors.Is(err, ErrPortTaken) {
			t.Errorf("%s: %v", why, err)
		}
		if list := n.endpoints(); len(list) != 2 {
			t.Errorf("%s: the endpoints are %+v", why, list)
		}
	}
	taken("its pod is there")
	for why, path := range map[string]string{
		"there is no such directory here": strings.Replace(dead.Netns, "/netns/", "/netns-of-the-runtime/", 1),
		"it is of no process here":        "/proc/4194999/ns/net",
		"nothing is mounted there, here":  "/etc/passwd",
	} {
		unseen := dead
		unseen.Netns = path
		n.must(func(e *Engine) error { return e.store.PutEndpoint(unseen) })
		taken(why)
	}
	n.must(func(e *Engine) error { return e.store.PutEndpoint(dead) })
	die()
	n.must(func(e *Engine) error { return errors.Join(e.AddHostPorts(portOf(3)), e.CheckHostPorts(portOf(3))) })
	if list := n.endpoints(); len(list) != 1 || list[0].ID != lives.ID {
		t.Errorf("the endpoints are %+v", list)
	}
}

// A filter inside a pod is seen by nobody who does not see the pod.
func TestAPodThatIsNotSeenIsNotGone(t *testing.T) {
	n := newNode(t)
	n.opts.NoTCX = true
	n.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up")
	path := n.child(1)
	n.must(func(e *Engine) error {
		ep, err := e.AddEndpoint(context.Background(), EndpointSpec{Netns: path, IfName: "eth0", Owner: state.OwnerCNI})
		ep.Netns = "/proc/4194999/ns/net"
		return errors.Join(err, e.store.PutEndpoint(ep))
	})
	n.must(func(e *Engine) error {
		dead, err := e.Dead(state.OwnerCNI)
		if len(dead) > 0 {
			t.Errorf("%+v are gone", dead)
		}
		return err
	})
}
