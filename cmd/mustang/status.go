// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
)

func newStatusCmd(g *globals) *cobra.Command {
	whole, kubeconfig := false, ""
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show programs, tables, kernel features, and dropped packets with their reasons",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if whole {
				return g.clusterStatus(cmd, kubeconfig)
			}
			if kubeconfig != "" {
				return usagef("--kubeconfig has no meaning without --cluster: drop it, or give both")
			}
			var s engine.Status
			err := g.with(cmd.Context(), true, func(e *engine.Engine) (err error) {
				s, err = e.Status()
				return err
			})
			if err != nil {
				return err
			}
			return g.after(func() error {
				s.AskNodes()
				v := statusView{s, podModes(s.Features.Missing())}
				return g.print(cmd.OutOrStdout(), v, func(w io.Writer) { statusTable(w, v) })
			})
		},
	}
	cmd.Flags().BoolVar(&whole, "cluster", false, "all nodes of the cluster, by their agents")
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "with --cluster: which (default: as kubectl)")
	return cmd
}

// statusView is what is printed.
type statusView struct {
	engine.Status
	Modes map[string]string `json:"modes"` // ways of connecting a pod → "" or what the kernel lacks for it
}

// podModes: whatever lacks what mustang cannot do without has no mode at all.
func podModes(missing []string) map[string]string {
	out := make(map[string]string, len(link.Modes))
	for _, mode := range link.Modes {
		out[mode] = ""
		if len(missing) > 0 {
			out[mode] = "mustang cannot connect pods: this kernel lacks " + strings.Join(missing, ", ")
		} else if err := link.Supported(mode); err != nil {
			out[mode] = err.Error()
		}
	}
	return out
}

func statusTable(w io.Writer, s statusView) {
	if !s.Present {
		row(w, "Mode", "nothing is loaded ("+s.BPFFS+" does not exist)")
	} else {
		row(w, "Mode", fmt.Sprintf("attached by %s; pins in %s, state in %s", s.Attach, s.BPFFS, s.StateDir))
		row(w, "Services", s.Services)
		row(w, "Endpoints", fmt.Sprintf("%d on the host's end, %d in the pod", s.Endpoints["host"], s.Endpoints["pod"]))
	}
	if n := s.Nodes; n != nil {
		row(w, "Nodes", nodesText(n))
	}
	outsideRows(w, s)
	row(w, "Sockets", "cgroup "+s.CgroupRoot)
	f := s.Features
	row(w, "Kernel", fmt.Sprintf("tcx %s, netkit %s, redirect_peer %s, netns cookie %s, coarse clock %s, set_retval %s, socket storage %s, LRU %s, BTF %s, BIG TCP ipv6 %s ipv4 %s, sockets ended %s",
		yes(f.TCX), yes(f.Netkit), yes(f.RedirectPeer), yes(f.NetnsCookie), yes(f.KtimeCoarse), yes(f.SetRetval), yes(f.SockStorage), yes(f.LRU), yes(f.BTF), yes(f.BigTCP6), yes(f.BigTCP4), yes(f.EndSockets)))
	if len(f.Missing()) == 0 { // else there is nothing to be different
		for _, lack := range f.Without() {
			row(w, "", lack)
		}
	}
	var can, cannot []string
	for _, mode := range link.Modes {
		if why := s.Modes[mode]; why == "" {
			can = append(can, mode)
		} else if !slices.Contains(cannot, why) {
			cannot = append(cannot, why)
		}
	}
	row(w, "Pods by", strings.Join(can, ", "))
	for _, why := range cannot {
		row(w, "", why)
	}
	if len(s.Programs) > 0 {
		row(w, "\nPROGRAM", "HOOK", "VERIFIED", "INSNS", "JITED", "MEMORY", "TAG")
		for _, p := range s.Programs {
			row(w, p.Name, p.Hook, p.Instructions, p.Translated, size(uint64(p.Jited)), size(p.Memory), p.Tag)
		}
	}
	if len(s.Tables) > 0 {
		var total uint64
		row(w, "\nTABLE", "USED", "SIZE", "MEMORY")
		for _, t := range s.Tables {
			used := fmt.Sprint(t.Entries)
			if t.Entries < 0 {
				used = "-"
			}
			row(w, t.Name, used, t.Max, size(t.Memory))
			total += t.Memory
		}
		row(w, "total", "", "", size(total))
	}
	if len(s.Drops) > 0 {
		row(w, "\nDROPPED", "BYTES", "DIRECTION", "BECAUSE")
		for _, d := range s.Drops {
			row(w, d.Packets, size(d.Bytes), d.Direction, d.Sentence+" ("+d.Reason+")")
		}
		row(w, "\nREASON", "WHAT TO DO")
		for _, d := range mends(s.Drops) {
			row(w, d.Reason, d.Mend)
		}
	}
	for _, r := range s.Bypassed {
		row(w, "\nBypassed", ruleText(r))
	}
	for _, line := range s.Warnings {
		row(w, "\nWarning: "+line)
	}
}

// outsideRows are who sees to what goes outside, and who has it tracked.
func outsideRows(w io.Writer, s statusView) {
	decided := func(what, by string, because []string) {
		row(w, what, by)
		for _, why := range because {
			row(w, "", "not by ebpf: "+why)
		}
	}
	if o := s.Outside; o != nil {
		decided("Outside", "pods with addresses of their own go there by "+o.By, o.Because)
	}
	if m := s.Masquerade; m != nil {
		decided("Masquerade", fmt.Sprintf("of %d pods, by %s", m.Pods, m.By), m.Because)
	}
	for _, chain := range s.Tracking {
		row(w, "Tracking", "the kernel tracks the node's connections for "+chain)
	}
}

// mends are drops, one for each reason.
func mends(drops []engine.Drop) (out []engine.Drop) {
	for _, d := range drops {
		if !slices.ContainsFunc(out, func(o engine.Drop) bool { return o.Reason == d.Reason }) {
			out = append(out, d)
		}
	}
	return out
}

func nodesText(n *engine.NodesStatus) string {
	self := n.Self
	if self == "" {
		self = "unnamed"
	}
	text := fmt.Sprintf("this is %s; %d others direct, %d by vxlan; host routing %s", self, n.Direct, n.VXLAN, n.HostRouting)
	if len(n.Devices) > 0 {
		text += " at " + strings.Join(n.Devices, ", ")
	}
	if n.PodMTU > 0 {
		text += fmt.Sprintf("; pods send them up to %d bytes", n.PodMTU)
	}
	return text
}

func ruleText(r engine.ForwardRules) string {
	text := fmt.Sprintf("%s table %s chain %s: ", r.Backend, r.Table, r.Chain)
	if r.Rules < 0 {
		text += "has rules"
	} else {
		text += fmt.Sprintf("%d rules", r.Rules)
	}
	if r.Policy != "" {
		text += ", policy " + r.Policy
	}
	return text
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "NO"
}
