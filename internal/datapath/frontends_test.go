// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"testing"
)

// The edge takes a port without its bit for the node's own: so each frontend's
// has it.
func TestPortsOfFrontendsAreTold(t *testing.T) {
	d := tables(t)
	var keys []FrontendKey
	ports := []uint16{0, 1, 63, 64, 443, 30080, 32767, 65535}
	for _, p := range ports {
		keys = append(keys, FrontendKey{Addr: FromAddr(netip.MustParseAddr("10.96.0.1")), Port: Port(p), Proto: 6})
	}
	if err := d.Frontends.Put(keys, make([]Frontend, len(keys))); err != nil {
		t.Fatal(err)
	}
	told := func(d *Datapath) (n int) {
		t.Helper()
		for port := range uint32(65536) {
			bits, _, err := d.Frontends.ports.Get(port / 64)
			if err != nil {
				t.Fatal(err)
			}
			n += int(bits >> (port % 64) & 1)
		}
		for _, p := range ports {
			if bits, _, err := d.Frontends.ports.Get(uint32(p) / 64); err != nil || bits>>(p%64)&1 == 0 {
				t.Errorf("port %d is not told: %v", p, err)
			}
		}
		return n
	}
	if n := told(d); n != len(ports) {
		t.Errorf("%d ports are told, want %d", n, len(ports))
	}
}
