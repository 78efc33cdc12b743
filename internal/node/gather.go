// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// gatherTable holds a rule that nothing ever meets. While it is there, this
// namespace's stack puts fragments together before it routes them, which it does
// for whoever needs whole packets (tproxy is the cheapest to want: no connection
// tracking), and sends them on in pieces of the same size, in order.
const gatherTable = "mustang-fragments"

func gather() *nftables.Table {
	return &nftables.Table{Name: gatherTable, Family: nftables.TableFamilyINet}
}

// GatherFragments has the stack put datagrams together. It can be done again.
func GatherFragments() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	t := c.AddTable(gather())
	// In no hook: no packet passes it.
	chain := c.AddChain(&nftables.Chain{Name: "held", Table: t})
	c.FlushChain(chain)
	c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{
		&expr.Immediate{Register: 1, Data: []byte{0, 1}},
		&expr.TProxy{Family: unix.NFPROTO_UNSPEC, TableFamily: unix.NFPROTO_INET, RegPort: 1},
	}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("add the nftables table %s: %w", gatherTable, err)
	}
	return nil
}

// LeaveFragments is the reverse. Absent is success.
func LeaveFragments() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	c.DelTable(gather())
	err = c.Flush()
	for _, absent := range []error{unix.ENOENT, unix.EINVAL, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} { // the last of a kernel without nftables
		if errors.Is(err, absent) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("remove the nftables table %s: %w", gatherTable, err)
	}
	return nil
}
