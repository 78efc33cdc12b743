// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// needsNetkit skips by the name of what the kernel lacks.
func needsNetkit(t *testing.T) {
	t.Helper()
	if !datapath.Probe().Netkit {
		t.Skip("this kernel has no netkit (Linux 6.7)")
	}
}

// netkitPod is pod by a closed netkit pair.
func (n *node) netkitPod(i int, mode string) string {
	n.t.Helper()
	name := n.name + "-nk"
	n.namespace(name)
	n.run("ip link add h%d type netkit mode %s blackhole peer blackhole name eth0 netns %s", i, mode, name)
	n.run("ip -n %s link set lo up && ip -n %s link set eth0 up && ip -n %s addr add 10.9.0.%d/32 dev eth0", name, name, name, i)
	n.run("ip addr add 10.9.9.1/32 dev lo && ip link set h%d up && ip route add 10.9.0.%d/32 dev h%d src 10.9.9.1", i, i, i)
	n.run("ip -n %s route add default via 169.254.10.24 dev eth0 onlink", name)
	if mode == "l2" {
		n.run("ip -n %s neigh add 169.254.10.24 dev eth0 lladdr $(cat /sys/class/net/h%d/address || ip -br link show h%d | awk '{print $3}')", name, i, i)
	}
	return netns.Path(name)
}

// answers says whether an echo comes back within seconds.
func answers(addr, seconds string) bool {
	return exec.Command("ping", "-c", "1", "-W", seconds, addr).Run() == nil
}

// A pair that was made closed opens with its programs, and closes when they go.
func TestNetkitOpensWithItsPrograms(t *testing.T) {
	needsNetkit(t)
	for _, mode := range []string{"l2", "l3"} {
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			path := n.netkitPod(1, mode)
			if answers("10.9.0.1", "2") {
				t.Fatal("it is open before it is an endpoint")
			}
			ep, err := n.add(path)
			if err != nil {
				t.Fatal(err)
			}
			if ep.Placement != state.HostEnd || ep.Attach != datapath.AttachNetkit || ep.HostIf != "h1" {
				t.Errorf("%+v", ep)
			}
			if !answers("10.9.0.1", "30") {
				t.Error("it stays closed")
			}
			n.must(func(e *Engine) error { return e.CheckEndpoint(ep.ID) })
			n.must(func(e *Engine) error { return e.store.Remove() })
			if list := n.endpoints(); len(list) != 1 || list[0].Attach != datapath.AttachNetkit {
				t.Errorf("after the store was lost: %+v", list)
			}
			n.must(func(e *Engine) error { return e.RemoveEndpoint(ep.ID) })
			if answers("10.9.0.1", "2") {
				t.Error("it is open without programs")
			}
		})
	}
}

// Whoever holds the primary end rules the pair, so that must not be the pod.
func TestNetkitHeldByThePodIsRefused(t *testing.T) {
	needsNetkit(t)
	n := newNode(t)
	name := n.name + "-nk"
	n.namespace(name)
	n.run("ip -n %s link add eth0 type netkit mode l2 peer name h1 netns %s", name, n.name)
	n.run("ip -n %s addr add 10.9.0.1/32 dev eth0", name)
	if _, err := n.add(netns.Path(name)); err == nil || !strings.Contains(err.Error(), "primary end") {
		t.Errorf("got %v", err)
	}
}
