// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
)

// followAgain is the pause before addresses are followed again, after the
// kernel had more to tell than it could keep.
const followAgain = 100 * time.Millisecond

// followAddresses has policy look at this node's addresses when they change: its
// own pods are always reached from them.
func (a *Agent) followAddresses(ctx context.Context) error {
	for ctx.Err() == nil {
		lost, err := a.followUntilLost(ctx)
		if err != nil {
			return fmt.Errorf("follow this node's addresses: %w", err)
		}
		if ctx.Err() != nil {
			return nil
		}
		a.log.Debug("the kernel's news of addresses were interrupted", "error", lost)
		select {
		case <-ctx.Done():
		case <-time.After(followAgain):
		}
	}
	return nil
}

// followUntilLost is one subscription, which is given back at its end: the library ends its reader alone.
func (a *Agent) followUntilLost(ctx context.Context) (lost, err error) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	updates := make(chan netlink.AddrUpdate)
	err = netlink.AddrSubscribeWithOptions(updates, ctx.Done(), netlink.AddrSubscribeOptions{
		ErrorCallback: func(err error) { lost = err },
	})
	if err != nil {
		return nil, err
	}
	a.policies.addressesMoved() // whatever was missed
	for u := range updates {
		// Each pod's host end has one of IPv6's, from which nobody calls.
		if ip := u.LinkAddress.IP; ip.To4() != nil || !ip.IsLinkLocalUnicast() {
			a.policies.addressesMoved()
		}
	}
	return lost, nil
}

// addressesMoved has the next step look at the node's addresses.
func (p *policies) addressesMoved() {
	p.moved.Store(true)
	select {
	case p.wake <- struct{}{}:
	default:
	}
}
