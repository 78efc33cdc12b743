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

// What a pod marked so that it would come to the node as something else stays in the pod.
func TestNothingComesToTheNodeButItsDevice(t *testing.T) {
	w := newWorld(t)
	s := w.spec(HostDevice, 0)
	w.add(s)
	before := w.links(w.node)
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
