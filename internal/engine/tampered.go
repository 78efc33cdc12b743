// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// tampered says what pods need of the node that was made with them, and that somebody
// has taken away since.
func (e *Engine) tampered(m *MasqueradeStatus) (out []string) {
	for _, family := range []struct {
		of           func(state.Endpoint) netip.Addr
		name, sysctl string
	}{
		{func(ep state.Endpoint) netip.Addr { return ep.IP4 }, "IPv4", "ipv4/ip_forward"},
		{func(ep state.Endpoint) netip.Addr { return ep.IP6 }, "IPv6", "ipv6/conf/all/forwarding"},
	} {
		needed := false
		for _, ep := range e.known {
			needed = needed || ep.Owner == state.OwnerCNI && ep.Placement == state.HostEnd && family.of(ep).IsValid()
		}
		if needed && netns.SysctlOff(family.sysctl) {
			key := "net." + strings.ReplaceAll(family.sysctl, "/", ".")
			out = append(out, fmt.Sprintf("%s is 0: the node forwards no %s, and pods reach none but each other; `sysctl -w %s=1`, and look for who sets it", key, family.name, key))
		}
	}
	if m == nil || m.By == "ebpf" {
		return out
	}
	if m.Pods > 0 {
		if why, err := e.noRules(); err == nil && why != "" {
			out = append(out, "nobody masquerades pods: "+why)
		}
	}
	return out
}
