// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// Many nodes are asked at once, by both families: of each it is said whether it answers, and
// whether it does to as much as the devices promise.
func TestEachNodesWireIsProbed(t *testing.T) {
	n := newDoorNode(t)
	far := fmt.Sprintf("mst-probe%d", os.Getpid())
	if err := netns.Create(netns.Path(far)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Delete(netns.Path(far)); err != nil {
			t.Error(err)
		}
	})
	n.run("ip link add wide type veth peer name far netns %s && ip link add narrow mtu 1500 type veth peer name less mtu 1400 netns %[1]s", far)
	n.run("ip link set wide up && ip link set narrow up && ip -n %s link set far up && ip -n %[1]s link set less up && ip -n %[1]s link set lo up", far)
	n.run("ip addr add 10.3.0.1/16 dev wide && ip addr add fd00:3::1/64 dev wide nodad && ip -n %s addr add 10.3.255.1/16 dev far && ip -n %[1]s addr add fd00:3::ffff/64 dev far nodad", far)
	n.run("ip addr add 10.4.0.1/16 dev narrow && ip -n %s addr add 10.4.0.2/16 dev less", far)
	const (
		answers = ""
		silent  = "does not answer an echo"
		cut     = "answers, but not 1500 bytes"
	)
	var batch strings.Builder
	var list []state.Node
	want := map[netip.Addr]string{}
	add := func(v4, v6 string, fault string) {
		node := state.Node{Name: fmt.Sprint("n", len(list))}
		for _, a := range []string{v4, v6} {
			if a != "" {
				addr := netip.MustParseAddr(a)
				node.Addrs, want[addr] = append(node.Addrs, addr), fault
			}
		}
		list = append(list, node)
	}
	for i := 1; i <= 300; i++ {
		v4, v6 := fmt.Sprintf("10.3.%d.%d", 1+i/200, 1+i%200), fmt.Sprintf("fd00:3::1:%x", i)
		if i%3 == 0 {
			add(v4, v6, silent)
			continue
		}
		fmt.Fprintf(&batch, "addr add %s/32 dev lo\naddr add %s/128 dev far nodad\n", v4, v6)
		add(v4, v6, answers)
	}
	add("10.4.0.2", "", cut)
	file := t.TempDir() + "/addresses"
	if err := os.WriteFile(file, []byte(batch.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	n.run("ip -n %s -batch %s", far, file)
	// A busy machine may answer too late once.
	wrong := []string{"nothing was asked"}
	for try := 0; try < 10 && len(wrong) > 0; try++ {
		wrong = nil
		probes := ProbeWire(list)
		if len(probes) != len(want) {
			t.Fatalf("%d answers, want %d", len(probes), len(want))
		}
		for _, p := range probes {
			if fault, known := want[p.Address]; !known || !strings.HasPrefix(p.Fault, fault) || fault == answers && p.Fault != "" {
				wrong = append(wrong, fmt.Sprintf("%s: %q, want %q", p.Address, p.Fault, fault))
			}
		}
	}
	if len(wrong) > 0 {
		t.Error(strings.Join(wrong, "\n"))
	}
}
