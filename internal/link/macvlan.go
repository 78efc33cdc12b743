// SPDX-License-Identifier: Apache-2.0

package link

// macvlan, bridge mode: the pod's interface is a sub-interface of the node's
// uplink with a MAC address of its own. See shim.go for what it shares with
// ipvlan.

func (b *builder) addMacvlan() (Result, error) { return b.addSub() }
