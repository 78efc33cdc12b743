// SPDX-License-Identifier: Apache-2.0

package link

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// A pod that may (CAP_NET_ADMIN) puts other interfaces in the place of its own, with their marks.
func TestWhatAPodPutInItsInterfacesPlaceHoldsUpNoDelete(t *testing.T) {
	for name, script := range map[string]string{
		"its loopback":         "ip link set eth0 down && ip link set eth0 name mine && ip link set lo down && ip link set lo name eth0 && ip link set eth0 group $GROUP",
		"its name on the node": "ip link add nic0 type veth peer name inside",
		"both":                 "ip link add nic0 group $GROUP type veth peer name inside && ip link set nic0 alias \"$ALIAS\"",
		"a bridge":             "ip link set eth0 down && ip link set eth0 name mine && ip link add eth0 group $GROUP type bridge && ip link set eth0 alias \"$ALIAS\"",
	} {
		eachMode(t, func(t *testing.T, mode string) {
			t.Run(name, func(t *testing.T) {
				w := newWorld(t)
				s := w.spec(mode, 0)
				w.add(s)
				cmd := exec.Command("nsenter", "--net="+s.NetNS, "sh", "-ec", script)
				cmd.Env = append(cmd.Environ(), "GROUP=0x6d7374", "ALIAS="+aliasPrefix+s.Name+deviceMark+s.Uplink)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				w.onNode(func() error { return Delete(s) })
			})
		})
	}
}

// By any name the device is found, and what has its name then is the pod's.
func TestADeviceThatThePodRenamedComesBack(t *testing.T) {
	for name, script := range map[string]string{
		"its name is free":      "ip link set eth0 down && ip link set eth0 name mine",
		"its name is another's": "ip link set eth0 down && ip link set eth0 name mine && ip link add eth0 type veth peer name nic0",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := w.spec(HostDevice, 0)
			before := w.deviceOf(s.Uplink)
			s.Taking = func(d Device) error { s.Device = &d; return nil }
			w.add(s)
			if out, err := exec.Command("nsenter", "--net="+s.NetNS, "sh", "-ec", script).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			w.onNode(func() error { return Delete(s) })
			if d := cmp.Diff(before, w.deviceOf(s.Uplink)); d != "" {
				t.Errorf("it comes back otherwise (-was +is):\n%s", d)
			}
		})
	}
}

// What a pod marked so that it would come to the node as something else stays in the pod.
func TestNothingComesToTheNodeButItsDevice(t *testing.T) {
	w := newWorld(t)
	s := w.spec(HostDevice, 0)
	before := w.links(w.node)
	w.add(s)
	script := "ip link set eth0 down && ip link set eth0 name mine && ip link add eth0 group $GROUP type veth peer name inside && ip link set eth0 alias \"$ALIAS\""
	cmd := exec.Command("nsenter", "--net="+s.NetNS, "sh", "-ec", script)
	cmd.Env = append(cmd.Environ(), "GROUP=0x6d7374", "ALIAS="+aliasPrefix+s.Name+deviceMark+"eth7")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.onNode(func() error { return Delete(s) })
	if d := cmp.Diff(before, w.links(w.node), cmpopts.SortSlices(strings.Compare)); d != "" {
		t.Errorf("links on the node changed:\n%s", d)
	}
}
