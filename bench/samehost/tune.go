// SPDX-License-Identifier: Apache-2.0

package samehost

// Contestants that send more at once: with a local MTU, with BIG TCP. All others
// run without either, so that the bars "at the same MTU" compare like with like.

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/lab"
)

// Tunes are what --tune knows.
var Tunes = []string{report.LocalMTU, report.BigTCP}

func validateTunes(tunes []string) error {
	for _, tune := range tunes {
		for _, part := range strings.Split(tune, "+") {
			if !slices.Contains(Tunes, part) {
				return fmt.Errorf("--tune %q is unknown: use some of %v, or several joined by +", tune, Tunes)
			}
		}
	}
	return nil
}

func (p pods) tunes() []string {
	if p.tune == "" {
		return nil
	}
	return strings.Split(p.tune, "+")
}

// tunable says whether the tune means anything for the contestant: mustang's
// pods only, and on a parent link no packet is longer than its MTU.
func (p pods) tunable() bool {
	if kernelServices(p.by) || p.by == lab.NoServices {
		return false
	}
	return !slices.Contains(p.tunes(), report.LocalMTU) || p.mode == report.Veth || p.mode == report.Bridge
}

func (p pods) applyTune(cfg *lab.Config) {
	cfg.LocalMTU = "off"
	for _, part := range p.tunes() {
		switch part {
		case report.BigTCP:
			cfg.BigTCP = lab.MaxBigTCP
		case report.LocalMTU:
			cfg.LocalMTU = "auto"
			if p.by == lab.MustangTC {
				// On the packet path a Service's address has a way of its own;
				// here, all backends are known to be near.
				cfg.LocalCIDRs = []netip.Prefix{lab.PodCIDR4, lab.PodCIDR6, lab.ServiceCIDR4, lab.ServiceCIDR6}
			}
		}
	}
}
