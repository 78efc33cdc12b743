// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

// Drop is one line of "why were packets dropped".
type Drop struct {
	Reason    string `json:"reason"`
	Sentence  string `json:"sentence"`
	Mend      string `json:"mend"`
	Direction string `json:"direction"` // "from_pod", "to_pod", "socket", "parent" or "edge"
	Packets   uint64 `json:"packets"`
	Bytes     uint64 `json:"bytes"`
}

// Status is what `mustang status` shows.
type Status struct {
	BPFFS      string                 `json:"bpffs"`
	StateDir   string                 `json:"state_dir"`
	CgroupRoot string                 `json:"cgroup_root"`
	Present    bool                   `json:"present"`         // the scope exists
	Attach     string                 `json:"attach"`          // "tcx" or "clsact"
	Current    bool                   `json:"current"`         // the loaded programs are this binary's
	Build      string                 `json:"build,omitempty"` // which programs are loaded: tags differ with each load
	Services   int                    `json:"services"`
	Endpoints  map[string]int         `json:"endpoints"` // by placement
	Nodes      *NodesStatus           `json:"nodes,omitempty"`
	Programs   []datapath.ProgramInfo `json:"programs"`
	Tables     []datapath.TableInfo   `json:"tables"`
	Features   datapath.Features      `json:"features"`
	Drops      []Drop                 `json:"drops"`
	Masquerade *MasqueradeStatus      `json:"masquerade,omitempty"`
	Outside    *OutsideStatus         `json:"outside,omitempty"`
	Tracking   []string               `json:"tracking"` // chains for which the kernel tracks each of the node's connections
	Bypassed   []ForwardRules         `json:"bypassed"` // firewall chains that redirected packets do not pass
	Warnings   []string               `json:"warnings"`
}

// Status looks at everything on this node and changes nothing. Other nodes are not asked.
func (e *Engine) Status() (Status, error) {
	s := Status{BPFFS: e.scope.BPFFS, StateDir: e.scope.StateDir, Present: e.dp != nil, Features: datapath.Probe(), Endpoints: map[string]int{},
		Programs: []datapath.ProgramInfo{}, Tables: []datapath.TableInfo{}, Drops: []Drop{}, Bypassed: []ForwardRules{}, Tracking: []string{}, Warnings: []string{}}
	root, err := e.scope.cgroupRoot()
	if err != nil {
		s.Warnings = append(s.Warnings, err.Error())
	}
	s.CgroupRoot = root
	rules, err := Firewall()
	if err != nil {
		s.Warnings = append(s.Warnings, "the host's firewall could not be looked at: "+err.Error())
	}
	tracking, err := trackers()
	s.Tracking = append(s.Tracking, tracking...)
	if err != nil {
		s.Warnings = append(s.Warnings, err.Error())
	}
	if e.dp == nil {
		return s, e.lostStatus(&s)
	}
	s.Attach = e.dp.AttachKind()
	services, err := e.Services()
	if err != nil {
		return s, err
	}
	for _, b := range services {
		if !b.Outside { // of some frontends there is a second one, for clients outside
			s.Services++
		}
	}
	if err := e.endpointsStatus(&s); err != nil {
		return s, err
	}
	nodes, warnings, err := e.nodesStatus()
	if err != nil {
		return s, err
	}
	s.Nodes, s.Warnings = nodes, append(s.Warnings, warnings...)
	if s.Masquerade, err = e.masqueradeStatus(); err != nil {
		return s, err
	}
	s.Warnings = append(s.Warnings, e.tampered(s.Masquerade)...)
	if s.Nodes != nil {
		if s.Outside, err = e.outsideStatus(); err != nil {
			return s, err
		}
	}
	programs, current, err := e.dp.Programs()
	if err != nil {
		return s, err
	}
	s.Programs, s.Current = append(s.Programs, programs...), current
	meta, err := e.dp.GetMeta()
	if err != nil {
		return s, err
	}
	if len(s.Programs) > 0 {
		s.Build = hex.EncodeToString(meta.Build[:8])
	}
	if s.Tables, err = e.dp.Tables(); err != nil {
		return s, err
	}
	if s.Drops, err = e.drops(); err != nil {
		return s, err
	}
	s.passedBy(rules)
	devices, err := e.deviceWarnings()
	if err != nil {
		return s, err
	}
	s.Warnings = append(s.Warnings, devices...)
	if len(s.Programs) > 0 && !s.Current {
		s.Warnings = append(s.Warnings, "the loaded programs are another build's; the next `mustang ep add` replaces them in place")
	}
	return s, nil
}

// endpointsStatus counts the endpoints, and names those that have lost their programs.
func (e *Engine) endpointsStatus(s *Status) error {
	endpoints, err := e.Endpoints()
	if err != nil {
		return err
	}
	for _, ep := range endpoints {
		s.Endpoints[string(ep.Placement)]++
	}
	unheld, err := e.unheld()
	if err != nil {
		s.Warnings = append(s.Warnings, err.Error())
	}
	for _, ep := range endpoints {
		if why := unseen(ep); why != "" {
			s.Warnings = append(s.Warnings, fmt.Sprintf("endpoint %d (%s in %s): nobody can tell whether its interface is there and has its programs: %s", ep.ID, ep.IfName, ep.Netns, why))
		} else if !isLost(ep) && !e.alive(ep) {
			s.Warnings = append(s.Warnings, fmt.Sprintf("endpoint %d (%s in %s): its interface is gone, and nothing reaches it; `mustang pod rm` or `mustang ep rm %[1]d` removes what is left", ep.ID, ep.IfName, ep.Netns))
		}
	}
	for _, ep := range unheld {
		s.Warnings = append(s.Warnings, fmt.Sprintf("the programs of endpoint %d (%s in %s) are off its interface: neither Services nor policies hold there; an agent puts them back, or `mustang ep rm` and `mustang ep add`", ep.ID, ep.IfName, ep.Netns))
	}
	return nil
}

// lostStatus warns of pods that are there, when there are no tables any more.
func (e *Engine) lostStatus(s *Status) error {
	records, err := e.store.LookEndpoints()
	for _, id := range slices.Sorted(maps.Keys(records)) {
		r := records[id]
		if why := unseen(r); why != "" {
			s.Warnings = append(s.Warnings, fmt.Sprintf("endpoint %d (%s in %s) was lost with the tables, and its pod, if it is there, is held to nothing: %s", id, r.IfName, r.Netns, why))
		}
		if e.isAsRecorded(r) {
			s.Warnings = append(s.Warnings, fmt.Sprintf("endpoint %d (%s in %s) was lost with the tables: neither Services nor policies hold there; the next command that writes restores it (`mustang node sync`)", id, r.IfName, r.Netns))
		}
	}
	return err
}

// deviceWarnings say what is wrong with the devices that the node's own programs are at.
func (e *Engine) deviceWarnings() (out []string, err error) {
	gather, err := e.gatherWarning()
	if err != nil {
		return nil, err
	}
	if gather != "" {
		out = append(out, gather)
	}
	gone, err := e.dp.GoneEdges()
	for _, i := range gone {
		out = append(out, fmt.Sprintf("interface %d of the edge is gone: clients outside reach Services by the others alone; `mustang edge set` names another", i))
	}
	return out, err
}

// passedBy says what of the host's the packets do not meet that eBPF forwards; rules are of its FORWARD chains.
func (s *Status) passedBy(rules []ForwardRules) {
	if s.Endpoints[string(state.HostEnd)] == 0 {
		return
	}
	ebpf := s.Nodes != nil && s.Nodes.HostRouting == state.RoutingEBPF
	if len(rules) > 0 {
		s.Bypassed = rules
		between := "between pods of this node"
		if ebpf {
			between += ", to and from pods of other nodes, and from pods to the outside where programs forward that (`mustang node set --host-routing legacy` lets those pass)"
		}
		s.Warnings = append(s.Warnings, "packets that eBPF forwards, "+between+", do not pass the host's FORWARD chains, which have rules or policy drop")
	}
	if !ebpf {
		return
	}
	policies, err := forwardPolicies()
	if err != nil {
		s.Warnings = append(s.Warnings, "the host's IPsec policies could not be looked at: "+err.Error())
	}
	if policies > 0 {
		s.Warnings = append(s.Warnings, fmt.Sprintf("packets that eBPF forwards off the node, and from there, meet none of the host's IPsec policies, of which there are %d: they leave unencrypted (`mustang node set --host-routing legacy` has them applied)", policies))
	}
}

// drops are the counted drops, most packets first.
func (e *Engine) drops() ([]Drop, error) {
	list, err := e.dp.DropsByReason()
	out := []Drop{}
	for _, d := range list {
		out = append(out, Drop{Reason: d.Reason.Name, Sentence: d.Reason.Sentence, Mend: d.Reason.Mend, Direction: datapath.DirectionNames[d.Direction],
			Packets: d.Packets, Bytes: d.Bytes})
	}
	slices.SortStableFunc(out, func(a, b Drop) int { return cmp.Compare(b.Packets, a.Packets) })
	return out, err
}

// legacyTable says whether iptables-legacy has the table in this namespace.
func legacyTable(family int, table string) bool {
	file := "/proc/thread-self/net/ip_tables_names"
	if family == unix.AF_INET6 {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	text, err := os.ReadFile(file)
	return err == nil && slices.Contains(strings.Fields(string(text)), table)
}

// ignoreNoNFT turns the errors of a kernel without nftables into nothing.
func ignoreNoNFT(err error) error {
	for _, e := range []error{unix.EINVAL, unix.EOPNOTSUPP, unix.ENOENT, unix.EPROTONOSUPPORT} {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
