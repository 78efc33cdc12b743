// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// deviceOf is what an interface of the node is like.
func (w *world) deviceOf(name string) Device {
	w.t.Helper()
	a := attrsOf(w.t, w.node, name)
	if a.Alias != "" || a.Group != 0 {
		w.t.Errorf("%s has alias %q and group %d", name, a.Alias, a.Group)
	}
	return Device{a.HardwareAddr, a.MTU}
}

// What the pod was given, and what it changed itself, is not the next pod's.
func TestHostDeviceComesBackAsItWas(t *testing.T) {
	byItself := func(w *world) error { // as the kernel moves it
		out, err := exec.Command("nsenter", "--net="+w.pods[0], "sh", "-c", "ip link set eth0 down && ip link set eth0 netns "+w.node).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	}
	for name, comes := range map[string]func(w *world, s Spec) error{
		"by Delete": func(_ *world, s Spec) error { return Delete(s) },
		"by itself, before Delete": func(w *world, s Spec) error {
			err := byItself(w)
			s.NetNS += "-gone"
			return errors.Join(err, Delete(s))
		},
		"by itself, before the next pod's Add": func(w *world, s Spec) error {
			err := byItself(w)
			s.Name = "next"
			s.Taking = func(d Device) error { s.Device = &d; return nil }
			_, added := Add(s)
			return errors.Join(err, added, Delete(s))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := w.spec(HostDevice, 0)
			before := w.deviceOf(s.Uplink)
			s.MAC, s.MTU = net.HardwareAddr{2, 0, 0, 0, 0, 8}, 1400
			s.Taking = func(d Device) error { s.Device = &d; return nil }
			w.add(s)
			if out, err := exec.Command("nsenter", "--net="+s.NetNS, "ip", "link", "set", "eth0", "mtu", "1300").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			w.onNode(func() error { return comes(w, s) })
			if d := cmp.Diff(before, w.deviceOf(s.Uplink)); d != "" {
				t.Errorf("it comes back otherwise (-was +is):\n%s", d)
			}
		})
	}
}

func TestHostDeviceOfAFailedAddIsAsItWas(t *testing.T) {
	fails := errors.New("not this time")
	for name, broken := range map[string]func(s *Spec){
		"nobody remembers": func(s *Spec) { s.Taking = func(Device) error { return fails } },
		"no programs":      func(s *Spec) { s.Attach = func(state.Endpoint) error { return fails } },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := w.spec(HostDevice, 0)
			before := w.deviceOf(s.Uplink)
			s.MAC, s.MTU = net.HardwareAddr{2, 0, 0, 0, 0, 8}, 1400
			broken(&s)
			if err := netns.Do(w.node, func() error { _, err := Add(s); return err }); !errors.Is(err, fails) {
				t.Fatalf("Add: %v", err)
			}
			if d := cmp.Diff(before, w.deviceOf(s.Uplink)); d != "" {
				t.Errorf("it is another now (-was +is):\n%s", d)
			}
		})
	}
}

func TestAHostDeviceThatCarriesAnotherStaysWithIt(t *testing.T) {
	for kind, args := range map[string]string{
		"vlan":    "link nic0 name nic0.5 type vlan id 5",
		"macvlan": "link nic0 name nic0.5 type macvlan mode bridge",
		"ipvlan":  "link nic0 name nic0.5 type ipvlan mode l2",
		"vxlan":   "nic0.5 type vxlan id 5 dev nic0 dstport 4789",
		"gre":     "nic0.5 type gre local 10.3.0.1 remote 10.3.0.2 dev nic0",
	} {
		t.Run(kind, func(t *testing.T) {
			w := newWorld(t)
			s := w.spec(HostDevice, 0)
			out, err := exec.Command("ip", append([]string{"-n", filepath.Base(w.node), "link", "add"}, strings.Fields(args)...)...).CombinedOutput()
			if strings.Contains(string(out), "Unknown device type") {
				t.Skipf("this kernel has no %s devices; the guests of test/vm do", kind)
			}
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			before := w.links(w.node)
			err = netns.Do(w.node, func() error { _, err := Add(s); return err })
			if err == nil || !strings.Contains(err.Error(), "uplink nic0 carries nic0.5 ("+kind+")") {
				t.Errorf("Add: %v", err)
			}
			if d := cmp.Diff(before, w.links(w.node)); d != "" {
				t.Errorf("links on the node changed:\n%s", d)
			}
		})
	}
}

// Virtual devices are built without an address of their own, so this is by the attributes.
func TestHostDeviceThatNobodyRemembersHasTheAddressItWasBuiltWith(t *testing.T) {
	now, built, kept := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}, net.HardwareAddr{2, 0, 0, 0, 0, 3}
	for name, c := range map[string]struct {
		record *Device
		perm   net.HardwareAddr
		want   Device
	}{
		"a record":                   {&Device{kept, 9000}, built, Device{kept, 9000}},
		"no record":                  {nil, built, Device{MAC: built}},
		"no record and no address":   {nil, nil, Device{}},
		"a record and no address":    {&Device{kept, 9000}, nil, Device{kept, 9000}},
		"a device without addresses": {&Device{MTU: 1500}, nil, Device{MTU: 1500}},
	} {
		b := builder{Spec: Spec{Device: c.record}}
		if d := cmp.Diff(c.want, b.before(&netlink.LinkAttrs{HardwareAddr: now, PermHWAddr: c.perm, MTU: 1400})); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}

// A device that the kernel does not move is as it was: up, and its own.
func TestADeviceThatIsNotToBeMovedStaysUp(t *testing.T) {
	for name, c := range map[string]struct{ script, want string }{
		"with a port":    {"link add br9 type bridge; link add tap9 type veth peer name tap8; link set tap9 master br9; link set br9 up", "uplink br9 carries tap9 (veth)"},
		"without a port": {"link add br9 type bridge; link set br9 up", "move br9 into the pod"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			for _, line := range strings.Split(c.script, "; ") {
				if out, err := exec.Command("ip", append([]string{"-n", filepath.Base(w.node)}, strings.Fields(line)...)...).CombinedOutput(); err != nil {
					t.Fatalf("%s: %v: %s", line, err, out)
				}
			}
			s := w.spec(HostDevice, 0)
			s.Uplink = "br9"
			before := w.deviceOf("br9")
			err := netns.Do(w.node, func() error { _, err := Add(s); return err })
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Add: %v, want %q", err, c.want)
			}
			if attrsOf(t, w.node, "br9").Flags&net.FlagUp == 0 {
				t.Error("br9 is down")
			}
			if d := cmp.Diff(before, w.deviceOf("br9")); d != "" {
				t.Errorf("it is another now (-was +is):\n%s", d)
			}
		})
	}
}
