// SPDX-License-Identifier: Apache-2.0

package node

import (
	"strings"
	"testing"
)

// Networks of this host, of links and of groups are no pods': a route to them by another node would take them away here.
func TestPodsHaveNoSpecialAddresses(t *testing.T) {
	for cidr, special := range map[string]string{
		"127.0.0.0/8": "127.0.0.0/8", "96.0.0.0/3": "127.0.0.0/8", "224.0.0.0/4": "224.0.0.0/4", "239.1.0.0/16": "224.0.0.0/4",
		"169.254.0.0/24": "169.254.0.0/16", "0.0.0.0/1": "0.0.0.0/8", "fe80::/64": "fe80::/10", "::/64": "::1/128", "ff00::/16": "ff00::/8",
		"10.1.0.0/24": "", "fd00::/48": "", "2001:db8::/32": "",
	} {
		_, err := Parse(Spec{Name: "n1", Address: []string{"10.3.0.1", "fd00:10:3::1"}, PodCIDRs: []string{cidr}})
		if special == "" && err != nil || special != "" && (err == nil || !strings.Contains(err.Error(), cidr+" has addresses of "+special)) {
			t.Errorf("%s: %v", cidr, err)
		}
	}
}
