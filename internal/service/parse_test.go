// SPDX-License-Identifier: Apache-2.0

package service

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/internal/state"
)

// What is written arrives, each word of it, in every Service that comes of it.
func TestParseReadsEveryField(t *testing.T) {
	got, err := ParseAll([]Spec{
		{
			Service: "10.96.0.1:80", Backends: []string{"10.0.0.1:8080", "10.0.0.2:8081"}, NodePort: 30080,
			ExternalIPs: []string{"192.0.2.1"}, LoadBalancerIPs: []string{"192.0.2.2"}, SourceRanges: []string{"198.51.100.7/24", "::ffff:203.0.113.9/120"},
			ExternalPolicy: "Local", InternalPolicy: "Local", Affinity: "24h", Algorithm: "maglev",
		},
		{Service: "[fd96::1]:53", Protocol: "UDP", NodePort: 30053},
	})
	if err != nil || len(got) != 3 {
		t.Fatalf("%v, %v", got, err)
	}
	for i, proto := range []state.Protocol{state.TCP, state.UDP} {
		s := got[i]
		if want := proto.String() + " 10.96.0.1:80"; s.Name != want || len(s.Ports) != 1 || s.Ports[0].Protocol != proto {
			t.Fatalf("%+v; want one port, of %s", s, want)
		}
		if s.External != state.PolicyLocal || s.Internal != state.PolicyLocal || s.Algorithm != state.Maglev || s.Affinity != 24*time.Hour {
			t.Errorf("options of %+v", s)
		}
		if !slices.Equal(s.SourceRanges, []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("203.0.113.0/24")}) {
			t.Errorf("source ranges %v", s.SourceRanges)
		}
		fronts := []state.ServiceFrontend{
			{Kind: state.ClusterIP, AddrPort: netip.MustParseAddrPort("10.96.0.1:80")},
			{Kind: state.NodePort, AddrPort: netip.MustParseAddrPort("0.0.0.0:30080")},
			{Kind: state.ExternalIP, AddrPort: netip.MustParseAddrPort("192.0.2.1:80")},
			{Kind: state.LoadBalancer, AddrPort: netip.MustParseAddrPort("192.0.2.2:80")},
		}
		if !slices.Equal(s.Ports[0].Frontends, fronts) {
			t.Errorf("frontends %v, want %v", s.Ports[0].Frontends, fronts)
		}
		var backends []string
		for _, b := range s.Ports[0].Backends {
			backends = append(backends, b.AddrPort.String())
			if !b.Ready || !b.Serving || b.Terminating {
				t.Errorf("backend %+v is to be ready", b)
			}
		}
		if !slices.Equal(backends, []string{"10.0.0.1:8080", "10.0.0.2:8081"}) {
			t.Errorf("backends %v", backends)
		}
	}
	if six := got[2]; six.Name != "udp [fd96::1]:53" || six.Ports[0].Frontends[1].AddrPort != netip.MustParseAddrPort("[::]:30053") {
		t.Errorf("%+v", six)
	}
}

// A mistake is told once, and brings no others with it.
func TestAMistakeIsToldOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		spec Spec
		want string
	}{
		"backend without port":             {spec("10.96.0.1:80", "tcp", []string{"10.0.0.1"}), `backend "10.0.0.1" has no port`},
		"backend of no family":             {spec("10.96.0.1", "tcp", []string{"[fd00::1]:80"}), `service "10.96.0.1" has no port`},
		"the same wrong one twice":         {spec("10.96.0.1:80", "tcp", []string{"[fd00::1]:80"}), "is IPv6; give a backend of the Service's family, or add a Service with an IPv6 address"},
		"IPv4 backend of IPv6":             {spec("[fd96::1]:80", "tcp", []string{"10.0.0.1:80"}), "is IPv4; give a backend of the Service's family, or add a Service with an IPv4 address"},
		"no address before a colon":        {spec(":80", "tcp", nil), `"" is not an IP address`},
		"external IP with a zone":          {Spec{Service: "[fd96::1]:80", ExternalIPs: []string{"fd97::1%eth0"}}, "external IP fd97::1%eth0 of service [fd96::1]:80: an address with a zone cannot be a Service's; give it without %eth0"},
		"link-local backend":               {spec("[fd96::1]:80", "tcp", []string{"[fe80::1]:80"}), "backend [fe80::1]:80 is a link-local address"},
		"unknown algorithm":                {Spec{Service: "10.96.0.1:80", Algorithm: "best"}, "algorithm of service 10.96.0.1:80"},
		"unknown external policy":          {Spec{Service: "10.96.0.1:80", ExternalPolicy: "Near"}, "externalTrafficPolicy of service 10.96.0.1:80"},
		"external policy, nothing outside": {Spec{Service: "10.96.0.1:80", ExternalPolicy: "Local"}, "externalTrafficPolicy of service 10.96.0.1:80 is of clients outside"},
		"unknown internal policy":          {Spec{Service: "10.96.0.1:80", InternalPolicy: "Near"}, "internalTrafficPolicy of service 10.96.0.1:80"},
	} {
		_, err := Parse(tc.spec)
		if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v; want one line with %s", name, err, tc.want)
		}
	}
}

// IPv4 link-local addresses need no zone; 169.254.20.10 is what node-local DNS caches use.
func TestALinkLocalIPv4AddressCanBeAServices(t *testing.T) {
	if err := CheckFrontend(netip.MustParseAddrPort("169.254.20.10:53")); err != nil {
		t.Error(err)
	}
}
