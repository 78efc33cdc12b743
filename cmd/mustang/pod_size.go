// SPDX-License-Identifier: Apache-2.0

package main

// How much a pod sends at once: local MTU and BIG TCP. docs/mtu.md says what is
// safe where.

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/spf13/pflag"

	"github.com/mustang-net/mustang/internal/link"
)

// podSizeFlags are pod add's, as given.
type podSizeFlags struct {
	localMTU   string
	localCIDRs []string
	bigTCP     int
}

func (f *podSizeFlags) register(fl *pflag.FlagSet) {
	fl.StringVar(&f.localMTU, "local-mtu", "auto", fmt.Sprintf("MTU towards the node's own pods: auto (%d where it is safe and --local-cidr is given), off, or bytes", link.MaxLocalMTU))
	fl.StringSliceVar(&f.localCIDRs, "local-cidr", nil, "where this node's own pods are; may be given several times")
	fl.IntVar(&f.bigTCP, "big-tcp", 0, fmt.Sprintf("bundle TCP segments to this many bytes (%d without a number), as far as the node's uplink takes them", link.MaxBigTCP))
	fl.Lookup("big-tcp").NoOptDefVal = strconv.Itoa(link.MaxBigTCP)
}

// apply puts them into a spec that is otherwise complete.
func (f podSizeFlags) apply(s *link.Spec, plain bool) error {
	for _, c := range f.localCIDRs {
		p, err := netip.ParsePrefix(c)
		if err != nil || p.Bits() == 0 || p.Addr().Is4In6() {
			return fmt.Errorf("--local-cidr: %q is not a network: write one such as 10.1.0.0/24", c)
		}
		s.LocalCIDRs = append(s.LocalCIDRs, p.Masked())
	}
	if len(f.localCIDRs) > 0 && (plain || f.localMTU == "off") {
		return errors.New("--local-cidr has no meaning with --plain or --local-mtu off, which have no local MTU: drop one of them")
	}
	s.BigTCP = f.bigTCP
	switch f.localMTU {
	case "auto":
		// The kernel on its own forwards by interfaces' MTUs: what makes a
		// longer packet right is the datapath.
		if !plain && link.CanLocalMTU(s.Mode) && len(s.LocalCIDRs) > 0 && s.MTU < link.MaxLocalMTU {
			s.LocalMTU = link.MaxLocalMTU
		}
		return nil
	case "off":
		return nil
	}
	n, err := strconv.Atoi(f.localMTU)
	switch {
	case err != nil || n <= 0:
		return fmt.Errorf("--local-mtu: %q is unknown: use auto, off or a number of bytes", f.localMTU)
	case plain:
		return fmt.Errorf("--local-mtu: %d has no meaning with --plain, where the kernel carries packets between pods: drop one of them, or give --mtu", n)
	}
	s.LocalMTU = n
	return nil
}
