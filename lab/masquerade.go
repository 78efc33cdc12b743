// SPDX-License-Identifier: Apache-2.0

package lab

// Pods that wear their node's address towards all but pods.

import (
	"context"
	"fmt"
	"strings"
)

// MasqueradeArgs are AddPod's flags by which mustang sees to it for a pod.
func MasqueradeArgs() []string {
	return []string{"--masquerade", "--masquerade-exclude=" + PodCIDR4.String() + "," + PodCIDR6.String()}
}

const nftMasquerade = `
table %[1]s nat {
	chain postrouting {
		type nat hook postrouting priority srcnat
		%[1]s saddr %[2]s %[1]s daddr != %[2]s masquerade
	}
}
`

// Masquerade has the kernel do it for all pods of the node, by a rule as
// ip-masq-agent's.
func (n *Node) Masquerade(ctx context.Context) error {
	cmd := n.Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(fmt.Sprintf(nftMasquerade, "ip", PodCIDR4) + fmt.Sprintf(nftMasquerade, "ip6", PodCIDR6))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("masquerade pods of %s: %w: %s", n.Name, err, out)
	}
	return nil
}
