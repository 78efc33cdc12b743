// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// What no endpoint has is left to the stack by the NIC's small program, which asks nobody.
func TestTheNICAsksOnlyForWhatMayBeAPods(t *testing.T) {
	n := newWireNode(t, false, false)
	check(t, n.MstNodeProgramsV1.Put(uint32(bpfgen.NodeProgNetdevIn), newWall(t)))
	for _, v6 := range []bool{false, true} {
		for _, pod := range n.Pods {
			if r := n.fromNetdev(t, Eth(Router, [6]byte{}).IP(farPod(9, v6), pod.IP(v6)).TCP(1, 2, syn).Frame()); r.Verdict != Drop {
				t.Errorf("to pod %d, IPv6 %t: %v, want it asked about", pod.ID, v6, r)
			}
		}
		asked := 0
		for i := range 200 {
			if r := n.fromNetdev(t, Eth(Router, [6]byte{}).IP(farPod(9, v6), External(1+i, v6)).TCP(1, 2, syn).Frame()); r.Verdict != Next {
				asked++
			}
		}
		if asked > 2 { // of 65,536 bits a few are set
			t.Errorf("IPv6 %t: %d of 200 addresses that nobody has were asked about", v6, asked)
		}
	}
}
