// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// A pod may have a port of all addresses and the same of one, to another of its own
// (the API allows both), but not one of all addresses twice.
func TestAHostPortOfAllAddressesLeavesTheLoopbackItsOwn(t *testing.T) {
	all := PortMapping{HostPort: 8080, ContainerPort: 80, Protocol: state.TCP}
	loopback := PortMapping{HostPort: 8080, ContainerPort: 81, Protocol: state.TCP, HostIP: "127.0.0.1"}
	pod := []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}
	for _, list := range [][]PortMapping{{all, loopback}, {loopback, all}} {
		var c Config
		c.RuntimeConfig.PortMappings = list
		if err := c.validatePorts(); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range hostPorts(list, pod) {
			got = append(got, fmt.Sprintf("%s:%d %s", p.HostIP, p.HostPort, p.Pod))
		}
		slices.Sort(got)
		want := []string{"0.0.0.0:8080 10.0.0.2:80", "127.0.0.1:8080 10.0.0.2:81", "::1:8080 [fd00::2]:80", ":::8080 [fd00::2]:80"}
		if !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	for _, again := range []string{"", "0.0.0.0", "::"} {
		var c Config
		c.RuntimeConfig.PortMappings = []PortMapping{all, {HostPort: 8080, ContainerPort: 81, Protocol: state.TCP, HostIP: again}}
		if err := c.validatePorts(); err == nil {
			t.Errorf("all addresses, and %q: no error", again)
		}
	}
}
