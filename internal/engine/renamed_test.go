// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

// A pod that may (CAP_NET_ADMIN) renames its interface, and does not get rid of its programs by
// it at the next GC. Those of an interface that is gone go.
func TestARenamedInterfaceIsNotGone(t *testing.T) {
	for _, noTCX := range []bool{false, true} {
		t.Run(fmt.Sprintf("without tcx %v", noTCX), func(t *testing.T) { renamed(t, noTCX) })
	}
}

func renamed(t *testing.T, noTCX bool) {
	if !noTCX && !datapath.Probe().TCX {
		t.Skip("this kernel has no tcx")
	}
	n := newNode(t)
	n.opts.NoTCX = noTCX
	n.run("ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up")
	for i, path := range []string{n.child(1), n.pod(2)} {
		ns := []string{fmt.Sprintf("%s-m1", n.name), fmt.Sprintf("%s-p2", n.name)}[i]
		t.Run(ns, func(t *testing.T) {
			n.must(func(e *Engine) error {
				ep, err := e.AddEndpoint(context.Background(), EndpointSpec{Netns: path, IfName: "eth0", Owner: state.OwnerCNI})
				if err != nil {
					return err
				}
				n.run("ip -n %[1]s link set eth0 down && ip -n %[1]s link set eth0 name mine && ip -n %[1]s link set mine up", ns)
				if dead, err := e.Dead(state.OwnerCNI); err != nil || len(dead) != 0 {
					t.Errorf("renamed: %v are gone, %v", dead, err)
				}
				n.run("ip -n %s link del mine", ns)
				dead, err := e.Dead(state.OwnerCNI)
				if err != nil || len(dead) != 1 || dead[0].ID != ep.ID {
					t.Errorf("deleted: %v are gone, %v", dead, err)
				}
				return e.RemovePod(ep.ID)
			})
		})
	}
}
