// SPDX-License-Identifier: Apache-2.0

package link

// ipvlan: the pod's interface is a sub-interface of the node's uplink and has
// the uplink's MAC address; the kernel tells pods apart by their IP addresses.
//
// l2: a packet for the uplink's own MAC address goes to the sibling that has the
// IP address, or else into the node's stack, as if it had come in by the uplink.
// l3: the node's routing decides by which of the uplink's routes it leaves; what
// no route by the uplink leads to is not reached.

import (
	"fmt"
	"os"
	"strings"
)

func (b *builder) addIPVlan() (Result, error) {
	res, err := b.addSub()
	if err == nil && b.Mode == IPVlan && b.IPv4.IsValid() {
		err = b.loosenUplink()
	}
	return res, err
}

// loosenUplink lets pods' packets come in by the uplink, although the routes to
// the pods lead to the shim: a strict reverse path filter would drop them.
func (b *builder) loosenUplink() error {
	strict := false
	for _, name := range []string{"all", b.Uplink} { // the higher one counts
		value, err := os.ReadFile(b.sysctl("ipv4/conf/" + name + "/rp_filter"))
		if err != nil {
			return fmt.Errorf("read the reverse path filter of %s: %w", name, err)
		}
		strict = strict || strings.TrimSpace(string(value)) == "1"
	}
	if !strict {
		return nil
	}
	if err := os.WriteFile(b.sysctl("ipv4/conf/"+b.Uplink+"/rp_filter"), []byte("2"), 0); err != nil {
		return fmt.Errorf("loosen the reverse path filter of %s: %w", b.Uplink, err)
	}
	return nil
}
