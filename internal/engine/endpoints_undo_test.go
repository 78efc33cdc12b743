// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// An endpoint that cannot be added, nor taken back whole, is no endpoint, and does not
// become one later: neither by the next tool nor after an agent, which has the journal for
// what it does next.
func TestAnEndpointThatCouldNotBeAddedIsNotRestored(t *testing.T) {
	for name, agent := range map[string]bool{"tool": false, "agent": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			other, pod := n.pod(1), n.pod(2)
			e := n.open()
			add := func(path string) error {
				_, err := e.AddEndpoint(t.Context(), EndpointSpec{Netns: path, IfName: "eth0", Owner: state.OwnerCLI})
				return err
			}
			if err := add(other); err != nil { // from here on there are programs
				t.Fatal(err)
			}
			if err := e.dp.Map(bpfgen.PodMapMstPoliciesV1).Close(); err != nil { // policy can be neither written nor removed
				t.Fatal(err)
			}
			if err := add(pod); err == nil || !strings.Contains(err.Error(), bpfgen.PodMapMstPoliciesV1) {
				t.Fatal(err)
			}
			if op, left, err := e.pending(); err != nil || !left || op.Kind != opRemoveEndpoint {
				t.Errorf("the journal holds %q, %v, want that it goes: %v", op.Kind, left, err)
			}
			if agent {
				if err := e.BackendsGone(); err != nil {
					t.Fatal(err)
				}
			}
			_ = e.Close() // one table is closed already
			if got := n.endpoints(); len(got) != 1 {
				t.Errorf("%+v is there, want the other one's", got)
			}
			ep, err := n.add(pod)
			if err != nil {
				t.Fatal(err)
			}
			if got := n.endpoints(); len(got) != 2 {
				t.Errorf("%+v, want two", got)
			}
			n.must(func(e *Engine) error { return e.CheckEndpoint(ep.ID) })
		})
	}
}
