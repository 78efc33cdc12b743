// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/node"
)

// A device that settings name may be away when the agent begins: the node is ready with the others, health
// says which is awaited, and the edge is at it once it is there.
func TestANamedDeviceThatIsAwayAtTheStart(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		onNIC(t, "192.0.2.1/24")
		w := newScripted(t)
		defer w.close()
		both := []string{"nic0", "nic1"}
		w.agent.config.NodeMode, w.agent.config.Devices, w.agent.config.NodeDevices = "vxlan", both, both
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", "10.1.1.0/24"), clusterNode("n2", "192.0.2.2", "10.1.2.0/24")}, ""))
		w.turn()
		s := w.agent.sync
		if !s.synced.Load() || s.membersRetry.fails() || s.edgeRetry.fails() {
			t.Errorf("ready: %v; nodes fail: %v; the edge fails: %v", s.synced.Load(), s.membersRetry.fails(), s.edgeRetry.fails())
		}
		w.edges("one is away", "nic0")
		for _, setting := range []string{"configuration devices", "configuration node-devices"} {
			if told := w.agent.healthy().Problems[setting]; len(told) != 1 || !strings.Contains(told[0], "nic1") {
				t.Errorf("%s: told %q", setting, told)
			}
		}
		l := w.nic("nic1")
		s.followEdge(t.Context())
		w.edges("it is there", both...)
		if told := w.agent.healthy().Problems; len(told) != 0 {
			t.Errorf("all are there: told %q", told)
		}
		must(t, netlink.LinkDel(l))
		s.followEdge(t.Context())
		w.edges("it has gone", "nic0")
		if s.edgeRetry.fails() {
			t.Error("the edge fails")
		}
	})
}

// A node is for pods and load balancers once nodes and the edge are in force, not only Services and policy. What fails
// is tried again when its time has come, not with each change of anything.
func TestANodeIsNotReadyBeforeNodesAndTheEdge(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		onNIC(t, "192.0.2.1/24")
		w := newScripted(t)
		defer w.close()
		w.agent.config.NodeMode, w.agent.config.Devices = "vxlan", []string{"nic1"} // which is not there yet
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "theirs"
		theirs := &netlink.Vxlan{LinkAttrs: attrs, Port: node.DefaultPort, FlowBased: true} // who has the tunnel's port
		must(t, netlink.LinkAdd(theirs))
		must(t, netlink.LinkSetUp(theirs))
		s := w.agent.sync
		wants := func(when string, ready bool, failing ...*retrying) {
			t.Helper()
			w.turn()
			if got := s.synced.Load(); got != ready {
				t.Errorf("%s: ready %v, want %v", when, got, ready)
			}
			for _, r := range []*retrying{&s.membersRetry, &s.edgeRetry} {
				if r.fails() != slices.Contains(failing, r) {
					t.Errorf("%s: nodes fail: %v, the edge fails: %v", when, s.membersRetry.fails(), s.edgeRetry.fails())
				}
			}
		}
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", "10.1.1.0/24"), clusterNode("n2", "192.0.2.2", "10.1.2.0/24")}, ""))
		wants("neither can be", false, &s.membersRetry, &s.edgeRetry)
		due := s.edgeRetry.due
		check(t, w.agent.watch.Services.Replace([]any{&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s"}}}, ""))
		s.edgeRetry.due = due.Add(time.Hour)
		wants("something else changes", false, &s.membersRetry, &s.edgeRetry)
		if !s.edgeRetry.due.Equal(due.Add(time.Hour)) {
			t.Error("it was tried again before its time")
		}
		for _, r := range []*retrying{&s.membersRetry, &s.edgeRetry} { // for longer than is overlooked
			since := time.Now().Add(-2 * stuck)
			r.failed.Store(&since)
		}
		if got := w.agent.healthy().Because; len(got) != 3 {
			t.Errorf("not healthy because of %q, want the start, the nodes, and the edge", got)
		}
		must(t, netlink.LinkDel(theirs))
		s.membersRetry.due = time.Now()
		wants("nodes can be", false, &s.edgeRetry)
		l := w.nic("nic1")
		a, err := netlink.ParseAddr("198.51.100.1/24")
		must(t, err)
		must(t, netlink.AddrAdd(l, a))
		s.edgeRetry.due = time.Now()
		wants("both can be", true)
	})
}

// An agent whose pins are another's place by now says so: no pod starts there.
func TestABpffsThatIsMountedOver(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		says := func(want bool) {
			t.Helper()
			because := w.agent.works().Because
			if got := slices.ContainsFunc(because, func(s string) bool { return strings.Contains(s, "its bpffs was unmounted") }); got != want {
				t.Errorf("%q", because)
			}
		}
		mount := filepath.Dir(w.config.BPFFS)
		says(false)
		must(t, unix.Mount("bpf", mount, "bpf", 0, ""))
		says(true)
		must(t, unix.Unmount(mount, unix.MNT_DETACH))
		says(false)
	})
}
