// SPDX-License-Identifier: Apache-2.0

package observe

// What would let a packet pass that a Service stops, by who says what the Service is.

import (
	"fmt"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	services "github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

// mend is the smallest change that would let this packet pass; "" when the
// reason's own sentence says all there is.
func (q *question) mend(reason uint32) string {
	switch reason {
	case bpfgen.ReasonNoBackend:
		return q.giveBackend()
	case bpfgen.ReasonServicePort:
		return q.givePort()
	}
	return bpfgen.Reasons[reason].Mend
}

// giveBackend is a command only where that changes nothing else: --replace makes a
// Service what its flags say.
func (q *question) giveBackend() string {
	owner := state.Owner(q.front.Owner)
	if owner != state.OwnerCLI {
		return fmt.Sprintf("give the Service, which is %s's, a backend: see why none of its pods is ready", owner)
	}
	front := state.Frontend{AddrPort: q.dst, Protocol: state.Protocol(q.proto)}
	if q.front.Group != services.PlainGroup(owner, front) || q.n.store.HasService(services.PlainID(owner, front)) {
		return "give the Service a backend: `mustang svc add --replace`, or `mustang svc apply`, with all that `mustang svc ls -o wide` shows of it"
	}
	return fmt.Sprintf("give the Service a backend that is ready, such as `mustang svc add --service %s --protocol %s --backend ADDRESS:PORT --replace`", q.dst, protocolNames[q.proto])
}

func (q *question) givePort() string {
	all, err := q.n.dp.Frontends.All()
	if err != nil {
		return bpfgen.Reasons[bpfgen.ReasonServicePort].Mend
	}
	owner := state.OwnerCLI
	var ports []string
	for key, f := range all {
		if front := datapath.KeyFrom(key).Frontend; key.Proto != 0 && key.Scope == bpfgen.ScopeAny && front.AddrPort.Addr() == q.dst.Addr() {
			ports = append(ports, fmt.Sprintf("%d/%s", front.AddrPort.Port(), front.Protocol))
			if o := state.Owner(f.Owner); o != state.OwnerCLI {
				owner = o
			}
		}
	}
	slices.Sort(ports)
	use := fmt.Sprintf("use a port that the Service has (%s), or add this one", strings.Join(ports, ", "))
	if owner != state.OwnerCLI {
		return fmt.Sprintf("%s to the Service, which is %s's", use, owner)
	}
	return fmt.Sprintf("%s: `mustang svc add --service %s --protocol %s --backend ADDRESS:PORT`", use, q.dst, protocolNames[q.proto])
}
