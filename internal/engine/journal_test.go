// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/mustang-net/mustang/internal/state"
)

// What an operation on an endpoint takes away is read again as it was written, whichever of it there is.
func TestAnEndpointsJournalIsWhole(t *testing.T) {
	addr := netip.MustParseAddr("10.1.0.2")
	all := []departures{
		{Left: []departure{{state.Frontend{AddrPort: netip.AddrPortFrom(addr, 80), Protocol: state.TCP}, []netip.AddrPort{netip.AddrPortFrom(addr, 8080)}}}},
		{Gone: []state.Backend{{AddrPort: netip.AddrPortFrom(addr, 80)}}},
		{Pods: []netip.Addr{addr, netip.MustParseAddr("2001:db8::2")}},
		{Reset: true},
	}
	if n := reflect.TypeFor[departures]().NumField(); n != len(all) {
		t.Fatalf("departures has %d fields, and %d are tried", n, len(all))
	}
	for _, kind := range []string{opAddEndpoint, opRemoveEndpoint} {
		for _, d := range append(all, departures{}) {
			want := operation{Kind: kind, Endpoint: &state.Endpoint{ID: 7, IfIndex: 3}, Departures: d}
			text, err := json.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			var got operation
			if err := json.Unmarshal(text, &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(operation{}), cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); diff != "" {
				t.Errorf("%s, %s: %s", kind, text, diff)
			}
		}
	}
}
