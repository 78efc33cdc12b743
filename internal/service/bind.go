// SPDX-License-Identifier: Apache-2.0

package service

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/mustang-net/mustang/internal/state"
)

// MaxAffinity is the longest time-out of an affinity (the Service API allows
// no more than a day).
const MaxAffinity = 24 * time.Hour

// Bind is what s comes to on this node: a binding for each frontend, and one
// more where clients from outside have other backends. What cannot work is left
// out and named by the errors.
func Bind(s state.Service, node Node) (list []state.Binding, errs []error) {
	if s.Affinity < 0 || s.Affinity > MaxAffinity {
		errs = append(errs, invalid("its affinity lasts %v; a time-out is between 1 s and %v", s.Affinity, MaxAffinity))
		s.Affinity = min(max(s.Affinity, 0), MaxAffinity)
	}
	for i, port := range s.Ports {
		if port.Protocol != state.TCP && port.Protocol != state.UDP && port.Protocol != state.SCTP {
			errs = append(errs, invalid("port %s has %v, which is not supported; use tcp, udp or sctp", portName(port, i), port.Protocol))
			continue
		}
		bad := bindPort(s, i, node, &list)
		errs = append(errs, bad...)
	}
	return list, errs
}

func portName(p state.ServicePort, i int) string {
	if p.Name == "" {
		return fmt.Sprintf("number %d", i+1)
	}
	return fmt.Sprintf("%q", p.Name)
}

func bindPort(s state.Service, number int, node Node, list *[]state.Binding) (errs []error) {
	port := s.Ports[number]
	backends := make([]state.ServiceBackend, 0, len(port.Backends))
	for _, b := range port.Backends {
		if err := checkEndpoint(b.AddrPort); err != nil {
			errs = append(errs, err)
			continue
		}
		backends = append(backends, b)
	}
	var chosen [2]*Selection // by family
	group := groupOf(s.ServiceID, port)
	for _, f := range port.Frontends {
		if err := checkFrontend(f); err != nil && !nodesOwn(s, f) {
			errs = append(errs, err)
			continue
		}
		v6 := 0
		if f.AddrPort.Addr().Is6() {
			v6 = 1
		}
		if chosen[v6] == nil {
			sel := Select(backends, v6 == 1, node)
			for _, list := range []*[]netip.AddrPort{&sel.Cluster, &sel.Local} {
				if n := len(*list); n > MaxBackends {
					errs = append(errs, invalid("port %s has %d backends of one family that serve; only %d can, and the others are left out", portName(port, number), n, MaxBackends))
					*list = (*list)[:MaxBackends]
				}
			}
			chosen[v6] = &sel
		}
		*list = append(*list, bindFrontend(s, port, f, group, *chosen[v6])...)
	}
	return errs
}

// nodesOwn says that f is a host port of the node's loopback, which its own
// sockets alone can use. Services have none there: no pod would find them.
func nodesOwn(s state.Service, f state.ServiceFrontend) bool {
	return s.Owner == state.OwnerCNI && f.AddrPort.Addr().IsLoopback() && f.AddrPort.Port() != 0
}

// bindFrontend is the binding of f for clients of this node, and for those
// outside when the policy Local gives them others. A client of this node that
// uses an external address has no need of the policy: it is led to any backend.
func bindFrontend(s state.Service, port state.ServicePort, f state.ServiceFrontend, group uint64, sel Selection) []state.Binding {
	b := state.Binding{
		Owner: s.Owner, Service: s.ServiceID, Kind: f.Kind, Group: group,
		Frontend: state.Frontend{AddrPort: f.AddrPort, Protocol: port.Protocol},
		Backends: sel.Cluster, Affinity: wholeSeconds(s.Affinity), Algorithm: s.Algorithm,
	}
	if f.Kind == state.ClusterIP && s.Internal == state.PolicyLocal {
		b.Backends = sel.Local
	}
	if f.Kind == state.LoadBalancer {
		b.SourceRanges = s.SourceRanges
	}
	b.Drop = sel.Any && len(b.Backends) == 0
	if !f.Kind.External() || s.External != state.PolicyLocal {
		return []state.Binding{b}
	}
	b.SplitOutside = true
	out := b
	out.SplitOutside, out.Outside, out.KeepSource = false, true, true
	out.Backends = sel.Local
	out.Drop = sel.Any && len(out.Backends) == 0
	return []state.Binding{b, out}
}

// wholeSeconds rounds up: an affinity never ends early.
func wholeSeconds(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}

// groupOf names a Service's port for the tables, by the same number in every
// process: affinity and source ranges are kept under it. It is of 64 bits of a SHA-256:
// nobody can choose a name that opens another's ranges.
func groupOf(id state.ServiceID, port state.ServicePort) uint64 {
	var text []byte
	for _, s := range []string{id.Owner.String(), id.Namespace, id.Name, port.Name, port.Protocol.String()} {
		text = append(binary.AppendUvarint(text, uint64(len(s))), s...)
	}
	sum := sha256.Sum256(text)
	return binary.LittleEndian.Uint64(sum[:])
}
