// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"fmt"
	"hash/crc32"
	"net/netip"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/datapath/dptest/oracle"
)

// Maglev leads a flow by its addresses and ports: on every node to the same backend, also
// while some run another version.
func TestMaglevIsTheSameOnEveryNode(t *testing.T) {
	choices := make([]string, 2)
	for node := range choices {
		net := NewNetwork(t, Options{}, 3)
		for _, v6 := range []bool{false, true} {
			f, pod := end(VIP(1, v6), 80), net.Pods[3]
			table := []netip.AddrPort{}
			for i := range 8 {
				table = append(table, end(External(1+i%4, v6), 8080))
			}
			met := map[netip.AddrPort]bool{}
			net.SetServiceWith(t, ServiceOptions{Flags: bpfgen.SvcMaglev}, oracle.UDP, f, table...)
			for port := uint16(1); port < 60; port++ {
				s := speaker{t, net, oracle.UDP}
				a := s.send(pod, end(pod.IP(v6), port), f, 0)
				met[a.Tuple().Dst] = true
				choices[node] += fmt.Sprintln(a.Tuple().Dst)
			}
			if len(met) != 4 {
				t.Errorf("only %v", met)
			}
		}
	}
	if choices[0] != choices[1] {
		t.Error("two nodes disagree")
	}
	if sum := crc32.ChecksumIEEE([]byte(choices[0])); sum != 0xa3bc39a9 {
		t.Errorf("the choices' sum is %#x: flows change their backends as nodes are upgraded", sum)
	}
}
