// SPDX-License-Identifier: Apache-2.0

package main

// What concerns a whole cluster: status of all nodes, a test of connectivity, a
// dump for a report.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/agent"
	"github.com/mustang-net/mustang/internal/cluster"
	"github.com/mustang-net/mustang/internal/cluster/peer"
)

func (g *globals) connect(kubeconfig string) (*cluster.Cluster, error) {
	return cluster.Connect(kubeconfig, g.notify)
}

func (g *globals) clusterStatus(cmd *cobra.Command, kubeconfig string) error {
	c, err := g.connect(kubeconfig)
	if err != nil {
		return err
	}
	list, err := c.Status(cmd.Context())
	if err != nil {
		return err
	}
	if err := g.print(cmd.OutOrStdout(), list, func(w io.Writer) { clusterTable(w, list) }); err != nil {
		return err
	}
	return clusterVerdict(list)
}

// clusterVerdict is an error where a node is not well, or nobody can tell.
func clusterVerdict(list []cluster.NodeStatus) error {
	if slices.ContainsFunc(list, func(n cluster.NodeStatus) bool { return !n.Ready }) {
		return errors.New("not every node has an agent that is ready")
	}
	if slices.ContainsFunc(list, func(n cluster.NodeStatus) bool { return len(n.Problems) > 0 }) {
		return errors.New("not every node shows what its agent does")
	}
	return nil
}

func clusterTable(w io.Writer, list []cluster.NodeStatus) {
	row(w, "NODE", "AGENT", "RESTARTS", "NODES BY", "OTHERS", "SERVICES", "ENDPOINTS", "TABLES", "FULLEST", "DROPPED", "API SERVER", "KERNEL LACKS")
	for _, n := range list {
		agent := "not ready"
		if n.Ready {
			agent = "ready"
		}
		cells := []any{n.Node, agent, n.Restarts, "-", "-", "-", "-", "-", "-", "-", "-", "-"}
		if h := n.Health; h != nil {
			cells[3], cells[10] = h.NodeMode, "followed"
			if h.Unserved {
				cells[10] = "untold"
			} else if h.SyncAge > 0 {
				cells[10] = fmt.Sprintf("away for %.0f s", h.SyncAge)
			}
		}
		if s := n.Status; s != nil && s.Present { // else they would be noughts of nothing
			if s.Nodes != nil {
				cells[4] = s.Nodes.Direct + s.Nodes.VXLAN
			}
			cells[5], cells[6] = s.Services, s.Endpoints["host"]+s.Endpoints["pod"]
			cells[7], cells[8] = tableFill(n)
			var dropped uint64
			for _, d := range s.Drops {
				dropped += d.Packets
			}
			cells[9], cells[11] = dropped, lacking(n)
		}
		row(w, cells...)
	}
	for _, n := range list {
		if n.Health != nil {
			for _, because := range n.Health.Because {
				row(w, "\n"+n.Node+": not well: "+because)
			}
			for _, object := range slices.Sorted(maps.Keys(n.Health.Problems)) {
				row(w, "\n"+n.Node+": "+object+": "+strings.Join(n.Health.Problems[object], "; "))
			}
		}
		for _, problem := range n.Problems {
			row(w, "\n"+n.Node+": "+problem)
		}
		if n.Status == nil {
			continue
		}
		for _, d := range n.Status.Drops {
			row(w, fmt.Sprintf("\n%s: %d packets dropped %s: %s (%s); %s", n.Node, d.Packets, d.Direction, d.Sentence, d.Reason, d.Mend))
		}
		for _, warning := range n.Status.Warnings {
			row(w, "\n"+n.Node+": warning: "+warning)
		}
	}
}

// tableFill is the tables' memory, and the one that is fullest.
func tableFill(n cluster.NodeStatus) (memory, fullest string) {
	var total uint64
	most, fullest := 0.0, "-"
	for _, t := range n.Status.Tables {
		total += t.Memory
		if t.Type == ebpf.LRUHash.String() {
			continue // what has ended is there until its room is needed: full for good
		}
		if t.Max > 0 && float64(t.Entries)/float64(t.Max) > most {
			most = float64(t.Entries) / float64(t.Max)
			fullest = fmt.Sprintf("%s %.0f%%", strings.TrimPrefix(t.Name, "mst_"), 100*most)
		}
	}
	return size(total), fullest
}

// lacking are the optional kernel features that a node does without.
func lacking(n cluster.NodeStatus) string {
	f := n.Status.Features
	var out []string
	for _, x := range []struct {
		name string
		has  bool
	}{{"tcx", f.TCX}, {"netkit", f.Netkit}, {"redirect_peer", f.RedirectPeer}, {"socket storage", f.SockStorage}, {"BTF", f.BTF}} {
		if !x.has {
			out = append(out, x.name)
		}
	}
	if len(out) == 0 {
		return "nothing"
	}
	return strings.Join(out, ", ")
}

func newConnectivityCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{Use: "connectivity", Short: "Test a cluster's network"}
	cmd.AddCommand(newConnectivityTestCmd(g), newConnectivityServeCmd(), newConnectivityAskCmd(g), newConnectivityLoadCmd(g))
	return cmd
}

func newConnectivityTestCmd(g *globals) *cobra.Command {
	var o cluster.Options
	var kubeconfig, dump string
	cmd := &cobra.Command{
		Use:   "test",
		Short: "Make clients and servers in a namespace of their own, have them talk, and remove them",
		Long: `Makes clients and servers in a namespace of their own, from the agents' image,
and has them talk: pod to pod, by Services, node ports and names, to the outside,
long packets, with a policy, on one node and between two, by each family. Then
everything is removed. When something fails, a sysdump is written.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(o.Nodes) > 2 || len(o.Nodes) == 2 && o.Nodes[0] == o.Nodes[1] {
				return usagef("--nodes: %s are not two nodes; name two, or one to test it alone", strings.Join(o.Nodes, ","))
			}
			c, err := g.connect(kubeconfig)
			if err != nil {
				return err
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal while the namespace goes ends the process at once
			list, err := c.Test(ctx, o, func(k cluster.Check) {
				if k.Failed != "" {
					g.notify(fmt.Sprintf("failed: %s, %s to %s (%s): %s", k.What, k.From, k.To, k.Family, k.Failed))
				}
			})
			if err != nil && len(list) == 0 {
				return err
			}
			return errors.Join(g.print(cmd.OutOrStdout(), list, func(w io.Writer) { checksTable(w, list) }), g.verdict(ctx, c, list, dump), err)
		},
	}
	f := cmd.Flags()
	f.StringVar(&kubeconfig, "kubeconfig", "", "the cluster (default: as kubectl)")
	f.StringSliceVar(&o.Nodes, "nodes", nil, "the two nodes to test between, or one to test alone (default: the first two that are ready)")
	f.StringSliceVar(&o.Outside, "outside", nil, "HOST:PORT outside of the cluster (default: the API server's address)")
	f.BoolVar(&o.Keep, "keep", false, "leave the namespace, to look into it")
	f.StringVar(&dump, "sysdump", "mustang-sysdump-{time}.tar.gz", "written when something fails; none")
	refuseEmpty(f)
	return cmd
}

// verdict is an error when a check failed, after a sysdump; whoever interrupts waits for none.
func (g *globals) verdict(ctx context.Context, c *cluster.Cluster, list []cluster.Check, dump string) error {
	failed := 0
	for _, k := range list {
		if k.Failed != "" {
			failed++
		}
	}
	if failed == 0 {
		return nil
	}
	err := fmt.Errorf("%d of %d checks failed", failed, len(list))
	if dump == "none" {
		return err
	}
	if ctx.Err() != nil {
		g.notify("no sysdump is written, for the test was interrupted; `mustang sysdump` writes one")
		return err
	}
	file := dumpFile(dump)
	if e := c.Sysdump(ctx, file); e != nil {
		return errors.Join(err, e)
	}
	g.notify("what a report needs is in " + file)
	return err
}

func dumpFile(pattern string) string {
	return strings.ReplaceAll(pattern, "{time}", time.Now().Format("20060102-150405"))
}

func checksTable(w io.Writer, list []cluster.Check) {
	row(w, "CHECK", "FROM", "TO", "FAMILY", "TOOK", "RESULT")
	passed := 0
	for _, k := range list {
		result := "ok"
		if k.Failed != "" {
			result = "FAILED: " + k.Failed
		} else {
			passed++
		}
		if k.Note != "" {
			result += " (" + k.Note + ")"
		}
		row(w, k.What, k.From, k.To, k.Family, fmt.Sprintf("%d ms", k.Millis), result)
	}
	row(w, fmt.Sprintf("\n%d of %d passed", passed, len(list)))
}

func newConnectivityServeCmd() *cobra.Command {
	silent := false
	cmd := &cobra.Command{
		Use: "serve", Short: "The test's server, in its pods", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if silent {
				<-cmd.Context().Done()
				return nil
			}
			return peer.Serve(cmd.Context(), peer.Port)
		},
	}
	cmd.Flags().BoolVar(&silent, "silent", false, "serve nothing")
	return cmd
}

func newConnectivityAskCmd(g *globals) *cobra.Command {
	timeout, times, inVain := 5*time.Second, 1, false
	cmd := &cobra.Command{
		Use: "ask HOW TARGET", Short: "The test's client, in its pods", Hidden: true, Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			g.Output = "json"
			for range times {
				ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
				a, err := peer.Ask(ctx, args[0], args[1])
				cancel()
				if inVain {
					if err == nil {
						return fmt.Errorf("%s answered, and should not have", a.Server)
					}
					continue
				}
				if err != nil {
					return err
				}
				if err := g.print(cmd.OutOrStdout(), a, nil); err != nil {
					return err
				}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.DurationVar(&timeout, "timeout", timeout, "for one question")
	f.IntVar(&times, "times", times, "how often to ask")
	f.BoolVar(&inVain, "in-vain", false, "no question may be answered")
	return cmd
}

func newConnectivityLoadCmd(g *globals) *cobra.Command {
	duration, clients, rate := time.Minute, 4, 25
	cmd := &cobra.Command{
		Use: "load TARGET", Short: "A load that counts what fails, in the test's pods", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if clients < 1 {
				return usagef("--clients: %d is out of range: use 1 or more", clients)
			}
			if rate < 1 {
				return usagef("--rate: %d is out of range: use 1 or more", rate)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), duration)
			defer cancel()
			g.Output = "json"
			return g.print(cmd.OutOrStdout(), peer.Generate(ctx, args[0], clients, rate), nil)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&duration, "for", duration, "how long")
	f.IntVar(&clients, "clients", clients, "clients of each kind")
	f.IntVar(&rate, "rate", rate, "questions a second of each client")
	return cmd
}

func newSysdumpCmd(g *globals) *cobra.Command {
	var kubeconfig, file string
	cmd := &cobra.Command{
		Use:   "sysdump",
		Short: "Write what a report of a fault needs: agents' status, tables and logs, and the cluster's objects (no Secrets)",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := g.connect(kubeconfig)
			if err != nil {
				return err
			}
			file = dumpFile(file)
			if err := c.Sysdump(cmd.Context(), file); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), file)
			return nil
		},
	}
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "the cluster (default: as kubectl)")
	cmd.Flags().StringVar(&file, "file", "mustang-sysdump-{time}.tar.gz", "what to write")
	return cmd
}

// newAgentHealthCmd asks the agent of this node, where no other program can.
func newAgentHealthCmd(g *globals) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Ask this node's agent how it is, as /healthz answers",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := agent.Defaults()
			if file != "" {
				var err error
				if c, err = c.Read(file); err != nil {
					return usageError{err}
				}
			}
			h, err := agent.AskHealth(cmd.Context(), c)
			if err != nil {
				return err
			}
			if !g.structured() {
				g.Output = "json"
			}
			return g.print(cmd.OutOrStdout(), h, nil)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "the agent's YAML")
	return cmd
}
