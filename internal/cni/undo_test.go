// SPDX-License-Identifier: Apache-2.0

package cni

// A DEL that failed half-way, and is done again when others are where it was.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// noEngine is an agent's part of a call that answers one thing.
type noEngine struct{ err error }

func (n *noEngine) do(context.Context, request) (state.Endpoint, error) {
	return state.Endpoint{}, n.err
}
func (n *noEngine) wanted() error               { return nil }
func (n *noEngine) alone(string) (func(), bool) { return func() {}, true }

// ownNode is a plugin in an empty network namespace, which ends with the test.
func ownNode(t *testing.T) (*plugin, *noEngine) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread() // never unlocked: the namespace ends with the thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	c, err := configOf(attachment{Network: "net", Config: json.RawMessage(`{"cniVersion": "1.0.0", "name": "net", "type": "mustang-cni", "masquerade": true,
		"ipam": {"type": "mustang", "pools": ["10.4.0.0/24", "fd00:4::/64"]}}`)}, engine.Scope{StateDir: t.TempDir()})
	if err == nil {
		err = c.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	e := &noEngine{}
	return &plugin{Config: c, store: storeAt(c.StateDir), ctx: t.Context(), tell: func(w string) { t.Log(w) }, by: worker{agent: e}}, e
}

// attached is a recorded attachment of a container that had these addresses; none:
// the next free ones.
func (p *plugin) attached(t *testing.T, id, netns string, addrs ...netip.Addr) attachment {
	t.Helper()
	a := attachment{ContainerID: id, IfName: "eth0", Network: "net", State: stateReady, Mode: link.Macvlan, Uplink: "up0",
		NetNS: netns, IPAM: OwnIPAM, Addrs: addrs, Masquerade: p.masqueradeGroup()}
	if len(addrs) == 0 {
		list, err := p.store.ipam().Allocate(a.owner(), p.IPAM.Pools, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range list {
			a.Addrs = append(a.Addrs, x.Prefix.Addr())
		}
	}
	if err := p.store.Locked(func() error { return p.store.Write(a.file(), a) }); err != nil {
		t.Fatal(err)
	}
	return a
}

func command(t *testing.T, args string) string {
	t.Helper()
	words := strings.Fields(args)
	out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", args, err, out)
	}
	return string(out)
}

func TestAddressesAreGivenBackWhenAllElseIsDone(t *testing.T) {
	p, e := ownNode(t)
	a := p.attached(t, "c1", "/nowhere")
	e.err = errors.New("the engine is busy")
	for range 2 {
		if err := p.undo(a, false); !errors.Is(err, e.err) {
			t.Fatalf("got %v", err)
		}
		for _, addr := range a.Addrs {
			if owner := p.store.ipam().Owner(addr); owner != a.owner() {
				t.Errorf("%s, by which the engine still knows the pod, is %q's", addr, owner)
			}
		}
	}
	e.err = nil
	if err := p.undo(a, false); err != nil {
		t.Fatal(err)
	}
	if left, err := p.store.ipam().Owners(); len(left) > 0 || err != nil {
		t.Errorf("not given back: %v, %v", left, err)
	}
}

// The way of the node to a pod on its own network, and the pod's masquerade, are by its
// address alone.
func TestARepeatedDELTouchesNothingOfWhoHasTheAddressNow(t *testing.T) {
	for _, ipam := range []string{OwnIPAM, ""} {
		t.Run(fmt.Sprintf("IPAM %q", ipam), func(t *testing.T) {
			p, _ := ownNode(t)
			command(t, "ip link add mv-up0 type veth peer name up0") // it need not be a shim
			command(t, "ip link set mv-up0 up")
			now := p.attached(t, "now", "/nowhere/now")
			if len(now.Addrs) != 2 {
				t.Fatalf("it has %v", now.Addrs)
			}
			if err := p.masqueradeAdd(now); err != nil {
				t.Fatal(err)
			}
			for _, addr := range now.Addrs {
				command(t, fmt.Sprintf("ip route add %s dev mv-up0", addr))
				command(t, fmt.Sprintf("ip neigh add %s lladdr 02:00:00:00:00:07 dev mv-up0 nud permanent", addr))
			}
			has := func() (out []string) {
				members, err := p.natTable().Members(now.Masquerade)
				if err != nil {
					t.Fatal(err)
				}
				for _, addr := range now.Addrs {
					out = append(out, command(t, fmt.Sprintf("ip route show to %s dev mv-up0 table all type unicast", addr)),
						command(t, fmt.Sprintf("ip neigh show %s dev mv-up0 nud permanent", addr)), fmt.Sprint(slices.Contains(members, addr)))
				}
				return out
			}
			before := has()
			if slices.Contains(before, "") || slices.Contains(before, "false") {
				t.Fatalf("it has %q", before)
			}
			once := p.attached(t, "once", "/nowhere/once", now.Addrs...)
			once.State, once.IPAM = stateMaking, ipam
			if err := p.undo(once, false); err != nil {
				t.Fatal(err)
			}
			if after := has(); !slices.Equal(before, after) {
				t.Errorf("the pod that has the addresses now has\n%q and had\n%q", after, before)
			}
			if err := p.store.Forget(once.file()); err != nil {
				t.Fatal(err)
			}
			now.IPAM = ipam
			if err := p.undo(now, false); err != nil {
				t.Fatal(err)
			}
			if left := has(); slices.ContainsFunc(left, func(s string) bool { return s != "" && s != "false" }) {
				t.Errorf("its own DEL leaves %q", left)
			}
		})
	}
}

// In the agent, the place is given by a descriptor too.
func TestUndoLeavesAPlaceThatIsAnothers(t *testing.T) {
	p, _ := ownNode(t)
	place := netns.Path(fmt.Sprintf("mstundo-%d", os.Getpid()))
	if err := netns.Create(place); err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(place)
	p.attached(t, "now", place)
	once := p.attached(t, "once", place)
	err := netns.Do(place, func() error { // it is about to be made
		const ours = 0x6d7374 // link's group
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Group: ours}, PeerName: "other"})
	})
	if err != nil {
		t.Fatal(err)
	}
	p.here.NetNS = place
	if err := p.undo(once, true); err != nil {
		t.Fatal(err)
	}
	if err := netns.Do(place, func() error { _, err := netlink.LinkByName("eth0"); return err }); err != nil {
		t.Errorf("the other's interface: %v", err)
	}
}
