// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// While a flow needs the kernel's masquerade, each change of the devices asks who masquerades.
// All of the kernel's connections are looked through now and then, not each time.
func TestConnectionsAreLookedThroughNowAndThen(t *testing.T) {
	w := newEdgeWorld(t)
	edge := Edge{Devices: []string{"w0", "w1"}, Host: true}
	w.serve(w.client, "client", 8080)
	bare := w.endpoints()
	w.must(func(e *Engine) error {
		if err := e.RemoveEndpoint(bare[0].ID); err != nil {
			return err
		}
		if _, err := e.AddEndpoint(context.Background(), EndpointSpec{Netns: w.pod, IfName: "eth0", Owner: state.OwnerCLI, Masquerade: &state.Masquerade{}}); err != nil {
			return err
		}
		return e.SetEdge(Edge{}) // without one, the kernel masquerades
	})
	if _, saw, err := ask(w.pod, "tcp", "198.51.100.9:8080"); err != nil || saw.String() != "198.51.100.1" {
		t.Fatalf("the client sees %v, %v; want the node", saw, err)
	}
	w.must(func(e *Engine) error {
		if err := e.SetEdge(edge); err != nil {
			return err
		}
		looked := e.lingered
		if !e.lingers || looked.IsZero() {
			return fmt.Errorf("the kernel's part lingers: %v; looked through at %v", e.lingers, looked)
		}
		for range 10 {
			if _, err := e.FollowEdge(edge); err != nil {
				return err
			}
			if e.lingered != looked || !e.lingers {
				return fmt.Errorf("connections were looked through at %v, and again at %v", looked, e.lingered)
			}
		}
		e.lingered = looked.Add(-lingerPause)
		_, err := e.Settle(0)
		if e.lingered == looked.Add(-lingerPause) {
			t.Error("who settles pods does not look again")
		}
		return err
	})
}
