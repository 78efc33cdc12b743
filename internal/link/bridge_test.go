// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/state"
)

// A bridge has its lowest port's address, unless somebody gives it one; pods know it as
// their gateway's.
func TestABridgeThatWasThereKeepsItsMACAddress(t *testing.T) {
	for name, port := range map[string]string{"without ports": "", "with a NIC": "52:54:00:00:00:01"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.onNode(func() error {
				br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
				if err := netlink.LinkAdd(br); err != nil || port == "" {
					return err
				}
				return onBridge(br, port)
			})
			mac := func() string { return attrsOf(t, w.node, "br0").HardwareAddr.String() }
			was := mac()
			for i := range 10 {
				s := w.spec(Bridge, i%2)
				s.Name, s.BridgeName, s.Open = fmt.Sprintf("pod-%d", i), "br0", false
				if i > 1 {
					w.onNode(func() error {
						gone := w.spec(Bridge, i%2)
						gone.Name = fmt.Sprintf("pod-%d", i-2)
						return Delete(gone)
					})
				}
				s.Attach = func(ep state.Endpoint) error {
					if ep.NodeMAC.String() != was {
						t.Errorf("pod %d is told that its gateway is %s, which is %s", i, ep.NodeMAC, was)
					}
					return nil
				}
				w.add(s)
				if now := mac(); now != was {
					t.Fatalf("with pod %d the bridge has %s, and had %s", i, now, was)
				}
			}
		})
	}
}

// onBridge makes the uplink, as a NIC with that address, a port.
func onBridge(br netlink.Link, mac string) error {
	up0, err := netlink.LinkByName("up0")
	if err != nil {
		return err
	}
	a, err := net.ParseMAC(mac)
	return errors.Join(err, netlink.LinkSetHardwareAddr(up0, a), netlink.LinkSetMaster(up0, br))
}
