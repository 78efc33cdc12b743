// SPDX-License-Identifier: Apache-2.0

package observe

// Events in words.

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
)

// What happened, and what became of the packet.
const (
	Opened  = "opened"
	Closed  = "closed"
	Stopped = "stopped"

	Forwarded = "forwarded"
	Dropped   = "dropped"
	Refused   = "refused"
)

// End is one end of a flow.
type End struct {
	Address   netip.Addr        `json:"address,omitzero"`
	Port      uint16            `json:"port,omitempty"`
	Endpoint  uint32            `json:"endpoint,omitempty"`  // of this node
	Namespace string            `json:"namespace,omitempty"` // of Kubernetes
	Pod       string            `json:"pod,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`

	within string // the namespace of a pod without a name, which has none in Namespace
}

// Name is namespace/pod, or pod, or "".
func (e End) Name() string {
	if e.Namespace != "" {
		return e.Namespace + "/" + e.Pod
	}
	return e.Pod
}

func (e End) addrPort() string {
	if !e.Address.IsValid() {
		return "?"
	}
	if e.Port == 0 {
		return e.Address.String()
	}
	return netip.AddrPortFrom(e.Address, e.Port).String()
}

// String is the name, when there is one, and the address.
func (e End) String() string { return strings.TrimSpace(e.Name() + " " + e.addrPort()) }

// ServiceRef is the Service that a flow went to.
type ServiceRef struct {
	Frontend netip.AddrPort `json:"frontend"`
	Number   uint32         `json:"number,omitempty"` // as `mustang svc ls` shows it; 0: it is gone, or the address has no such port
	Backend  uint32         `json:"backend,omitempty"`
}

func (s ServiceRef) String() string {
	if s.Number == 0 {
		return "Service " + s.Frontend.String()
	}
	return fmt.Sprintf("Service %d (%s)", s.Number, s.Frontend)
}

// Flow is an event for people and scripts. docs/observe.md describes its JSON.
type Flow struct {
	Time        time.Time   `json:"time"`
	Event       string      `json:"event"`     // opened, closed, stopped
	Verdict     string      `json:"verdict"`   // forwarded, dropped, refused
	Direction   string      `json:"direction"` // from_pod, to_pod, socket, parent, edge
	Hook        End         `json:"hook"`      // the pod whose hook it was, without an address
	Protocol    string      `json:"protocol"`
	TCPFlags    string      `json:"tcp_flags,omitempty"`
	Source      End         `json:"source"`
	Destination End         `json:"destination"` // the backend, where a Service gave one
	Service     *ServiceRef `json:"service,omitempty"`
	SourceMAC   string      `json:"source_mac,omitempty"` // of what was stopped
	Bytes       uint32      `json:"bytes,omitempty"`      // of the packet
	Policy      []Judged    `json:"policy,omitempty"`     // of a flow's first packet: each end that is isolated
	Reason      string      `json:"reason,omitempty"`
	Sentence    string      `json:"sentence,omitempty"`
	Mend        string      `json:"mend,omitempty"`
}

// describer turns events into flows.
type describer struct {
	n     *Node
	names nameCache
}

func newDescriber(n *Node) *describer { return &describer{n: n, names: nameCache{n: n}} }

func (d *describer) flow(e datapath.Event) Flow {
	f := Flow{
		Time:        wallClock(e.Time),
		Event:       word(eventWords, e.Kind),
		Verdict:     word(verdictWords, e.Verdict),
		Direction:   datapath.DirectionNames[e.Direction%bpfgen.DirCount],
		Hook:        d.end(e.Endpoint, datapath.Addr{}, 0),
		Protocol:    protocol(e),
		TCPFlags:    tcpFlags(e),
		Source:      d.end(e.SrcEndpoint, e.T.Src, e.T.Sport),
		Destination: d.end(e.DstEndpoint, e.T.Dst, e.T.Dport),
		Bytes:       e.Length,
	}
	if e.Target != (datapath.Addr{}) {
		f.Destination = d.end(e.DstEndpoint, e.Target, e.TargetPort)
	}
	if !hasPorts(e.Proto) {
		f.Source.Port, f.Destination.Port = 0, 0
	}
	f.Service = d.service(e)
	f.Policy = d.names.judged(e.Set, e.Rule)
	if e.Kind != bpfgen.EventStopped {
		return f
	}
	if e.SrcMac != [6]uint8{} {
		f.SourceMAC = net.HardwareAddr(e.SrcMac[:]).String()
	}
	if int(e.Reason) < len(bpfgen.Reasons) {
		r := bpfgen.Reasons[e.Reason]
		f.Reason, f.Sentence, f.Mend = r.Name, r.Sentence, r.Mend
	}
	return f
}

var (
	eventWords   = []string{bpfgen.EventOpened: Opened, bpfgen.EventClosed: Closed, bpfgen.EventStopped: Stopped}
	verdictWords = []string{bpfgen.EventForwarded: Forwarded, bpfgen.EventDropped: Dropped, bpfgen.EventRefused: Refused}
)

func word(words []string, n uint8) string {
	if int(n) < len(words) {
		return words[n]
	}
	return fmt.Sprint(n)
}

// wallClock is when the programs' clock said mono.
func wallClock(mono uint64) time.Time {
	return time.Now().Add(time.Duration(mono) - datapath.Monotonic()).Round(0)
}

func (d *describer) end(id uint32, a datapath.Addr, port uint16) End {
	e := End{Endpoint: id}
	if ep, known := d.names.endpoint(id); known {
		e = endOf(ep)
	}
	e.Address, e.Port = datapath.ToAddr(a), datapath.Port(port)
	return e
}

// service is what e was sent to: of a flow, the frontend that led to its
// backend; of what did not pass, its destination, when that is a Service's.
func (d *describer) service(e datapath.Event) *ServiceRef {
	key := datapath.FrontendKey{Addr: e.T.Dst, Port: e.T.Dport, Proto: e.Proto}
	if e.Backend != 0 {
		key.Addr, key.Port = e.Frontend, e.FrontendPort
	}
	found, err := d.n.dp.FindService(key.Addr, key.Port, key.Proto)
	missing := e.Reason == bpfgen.ReasonServicePort || e.Backend != 0
	if (err != nil || !found.Known) && !missing {
		return nil
	}
	front := datapath.KeyFrom(key).Frontend
	return &ServiceRef{Frontend: front.AddrPort, Number: found.Entry.Number, Backend: e.Backend}
}

// Protocol numbers (IANA).
const (
	protoICMP   = 1
	protoTCP    = 6
	protoUDP    = 17
	protoICMPv6 = 58
	protoSCTP   = 132
)

var protocolNames = map[uint8]string{protoICMP: "icmp", protoTCP: "tcp", protoUDP: "udp", protoICMPv6: "icmpv6", protoSCTP: "sctp"}

func hasPorts(proto uint8) bool { return proto == protoTCP || proto == protoUDP || proto == protoSCTP }

var ethertypes = map[uint16]string{0x0800: "ipv4", 0x86dd: "ipv6", 0x0806: "arp", 0x8100: "vlan"}

// protocol is the transport's name, or else what the frame says it carries.
func protocol(e datapath.Event) string {
	if name := protocolNames[e.Proto]; name != "" {
		return name
	}
	if e.Proto != 0 {
		return fmt.Sprintf("protocol %d", e.Proto)
	}
	kind := datapath.Port(e.Ethertype)
	if name := ethertypes[kind]; name != "" {
		return name
	}
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], kind)
	return fmt.Sprintf("ethertype %#x", b)
}

func tcpFlags(e datapath.Event) string {
	if e.Proto != protoTCP {
		return ""
	}
	var out []string
	for i, name := range []string{"fin", "syn", "rst", "psh", "ack", "urg", "ece", "cwr"} {
		if e.TcpFlags&(1<<i) != 0 {
			out = append(out, name)
		}
	}
	return strings.Join(out, ",")
}
