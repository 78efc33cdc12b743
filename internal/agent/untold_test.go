// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// A pod has its routes in its own hands, where it may (CAP_NET_ADMIN). One that cannot be told
// the MTU takes its node neither out of load balancers nor out of an upgrade.
func TestAPodThatCannotBeToldHoldsUpNoNode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	pod := fmt.Sprintf("mst-untold-%d", os.Getpid())
	must(t, netns.Create(netns.Path(pod)))
	defer func() { check(t, netns.Delete(netns.Path(pod))) }()
	inNamespace(func() {
		onNIC(t, "192.0.2.1/24")
		w := newScripted(t)
		defer func() { w.close() }()
		w.config.NodeMode = "vxlan"
		w.agent.config.NodeMode = "vxlan"
		script := fmt.Sprintf("ip link add h1 up type veth peer name eth0 netns %[1]s && ip -n %[1]s addr add 10.1.1.2/32 dev eth0 && ip -n %[1]s link set eth0 up && "+
			// A gateway that is out of reach: the route cannot be written.
			"ip -n %[1]s route add 10.9.9.9 dev eth0 && ip -n %[1]s route add default via 10.9.9.9 && ip -n %[1]s route del 10.9.9.9", pod)
		if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		w.tellObjects(nil, nil)
		w.turn()
		must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
			_, err := e.AddEndpoint(t.Context(), engine.EndpointSpec{Netns: netns.Path(pod), IfName: "eth0", Owner: state.OwnerCNI})
			return err
		}))
		for _, when := range []string{"at first", "after a restart"} {
			w.tellObjects(nil, nil)
			check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", "10.1.1.0/24"), clusterNode("n2", "192.0.2.2", "10.1.2.0/24")}, ""))
			w.turn()
			if w.agent.sync.membersRetry.fails() || !w.agent.sync.synced.Load() {
				t.Errorf("%s: the nodes are not in force", when)
			}
			must(t, w.agent.with(t.Context(), func(e *engine.Engine) error {
				if _, err := e.FollowDevices(); err == nil {
					t.Errorf("%s: nobody knows that a pod is to be told still", when)
				}
				return nil
			}))
			w.close()
			w.open()
		}
	})
}
