// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Whoever waits for a neighbour or for a segment that is sent again waits in each
// of several labs. A machine that has other work makes anybody wait, but not always.
func TestPlainPodsNodeAndOutsideReachEachOther(t *testing.T) {
	for _, mode := range Modes {
		t.Run(string(mode), func(t *testing.T) {
			var late []string
			for try := range 5 {
				t.Run(fmt.Sprint(try), func(t *testing.T) { late = lateAnswers(t, mode) })
				if t.Failed() || len(late) == 0 {
					return
				}
			}
			t.Errorf("first answers take their time in each lab; in the last: %s", strings.Join(late, "; "))
		})
	}
}

// lateAnswers wants all to reach each other, and says whose first answer came late.
func lateAnswers(t *testing.T, mode Mode) (late []string) {
	l := build(t, Config{Name: name("p"), Mode: mode}, 2)
	p := l.Node().Pods()
	for _, c := range []struct {
		what string
		from *Space
	}{{"pod", &p[0].Space}, {"node", &l.Node().Space}, {"outside", &l.Outside().Space}} {
		for _, ip := range []netip.Addr{p[1].IPv4, p[1].IPv6} {
			for _, network := range []string{"tcp", "udp"} {
				who, took, err := ask(c.from, network, netip.AddrPortFrom(ip, serverPort), deadline)
				if err != nil || who != "p2" {
					t.Errorf("%s to %s by %s: %q, %v", c.what, ip, network, who, err)
				} else if took > 500*time.Millisecond {
					late = append(late, fmt.Sprintf("%s to %s by %s: %s", c.what, ip, network, took))
				}
			}
		}
	}
	return late
}

// service puts all pods behind the i-th virtual address.
func service(l *Lab, i int, v6 bool, protocol string) Service {
	s := Service{VIP: VIP4(i), Port: 80, Protocol: protocol}
	if v6 {
		s.VIP = VIP6(i)
	}
	for _, p := range l.Node().Pods() {
		ip := p.IPv4
		if v6 {
			ip = p.IPv6
		}
		s.Backends = append(s.Backends, netip.AddrPortFrom(ip, serverPort))
	}
	return s
}

func TestServicesByTheKernel(t *testing.T) {
	for _, mode := range Modes {
		for _, by := range []ServiceBy{IptablesNFT, IptablesLegacy, NFT} {
			if mode == HostDevice {
				continue // the node is not in the way
			}
			t.Run(fmt.Sprintf("%s/%s", mode, by), func(t *testing.T) {
				l := build(t, Config{Name: name("s"), Mode: mode, Services: by, BridgeNF: true}, 2)
				checkServices(t, l)
			})
		}
	}
}

func checkServices(t *testing.T, l *Lab) {
	p := l.Node().Pods()
	for round := 1; round <= 2; round++ { // the second adds to the first
		var all []Service
		for _, v6 := range []bool{false, true} {
			for _, proto := range []string{"tcp", "udp"} {
				all = append(all, service(l, round, v6, proto))
			}
		}
		if err := l.Node().AddServices(testContext(t), all); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range []int{1, 2} {
		for _, vip := range []netip.Addr{VIP4(i), VIP6(i)} {
			for _, network := range []string{"tcp", "udp"} {
				to := netip.AddrPortFrom(vip, 80)
				// p1 is a backend too: it reaches itself through the Service.
				askAll(t, "pod", &p[0].Space, network, to, "p1", "p2")
				askAll(t, "node", &l.Node().Space, network, to, "p1", "p2")
				askAll(t, "outside", &l.Outside().Space, network, to, "p1", "p2")
			}
		}
	}
}

func TestServiceWithoutBackendsRefuses(t *testing.T) {
	for _, by := range []ServiceBy{IptablesNFT, IptablesLegacy, NFT} {
		t.Run(string(by), func(t *testing.T) {
			l := build(t, Config{Name: name("n"), Mode: Veth, Services: by}, 1)
			for _, vip := range []netip.Addr{VIP4(1), VIP6(1)} {
				s := Service{VIP: vip, Port: 80, Protocol: "tcp"}
				if err := l.Node().AddServices(testContext(t), []Service{s}); err != nil {
					t.Fatal(err)
				}
				if _, _, err := ask(&l.Node().Pods()[0].Space, "tcp", netip.AddrPortFrom(vip, 80), deadline); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("connect to %s: %v, want a refusal", vip, err)
				}
			}
		})
	}
}

func TestThousandServices(t *testing.T) {
	for _, by := range []ServiceBy{IptablesNFT, IptablesLegacy, NFT} {
		t.Run(string(by), func(t *testing.T) {
			l := build(t, Config{Name: name("m"), Mode: Veth, Services: by}, 2)
			var all []Service
			for i := range 1000 {
				all = append(all, service(l, i+1, false, "tcp"))
			}
			start := time.Now()
			if err := l.Node().AddServices(testContext(t), all); err != nil {
				t.Fatal(err)
			}
			t.Logf("1000 Services in %s", time.Since(start))
			askAll(t, "pod", &l.Node().Pods()[0].Space, "tcp", netip.AddrPortFrom(VIP4(1000), 80), "p1", "p2")
		})
	}
}

func TestBadServicesAreRefused(t *testing.T) {
	l := build(t, Config{Name: name("b"), Mode: Veth, Services: NFT}, 1)
	good := service(l, 1, false, "tcp")
	if err := l.Node().AddServices(testContext(t), []Service{good}); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Service){
		"again":    func(*Service) {},
		"protocol": func(s *Service) { s.Protocol = "icmp" },
		"port":     func(s *Service) { s.Port = 0 },
		"family":   func(s *Service) { s.VIP = VIP6(2) },
	} {
		bad := good
		change(&bad)
		if err := l.Node().AddServices(testContext(t), []Service{bad}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
