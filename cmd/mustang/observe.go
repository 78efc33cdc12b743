// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/observe"
)

func newObserveCmd(g *globals) *cobra.Command {
	var o observe.WatchOptions
	var ports []uint
	var follow bool
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Stream flows: opened, closed, refused, dropped, with the reason in words",
		Long: `Stream flows of this node: opened, closed, refused, dropped, with both ends by
name and the reason in words. It needs no agent and disturbs none. Nothing is
recorded of flows that pass while nobody watches; of packets that did not pass
the last are kept, and --last N shows them.`,
		Example: `  mustang observe --verdict dropped,refused
  mustang observe --last 20
  mustang observe --to 10.96.0.0/12 --protocol tcp -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, p := range ports {
				if p == 0 || p > 65535 {
					return usagef("--port: %d is not between 1 and 65535", p)
				}
				o.Filter.Ports = append(o.Filter.Ports, uint16(p))
			}
			if err := o.Filter.Check(); err != nil {
				return usageError{err}
			}
			if o.Last < 0 || o.Last == 0 && cmd.Flags().Changed("last") {
				return usagef("--last: %d is not a number of packets", o.Last)
			}
			if o.Sample == 0 {
				return usagef("--sample: 0 is none of the flows; 1 shows all")
			}
			if o.Last > 0 && !follow && len(o.Filter.Verdicts) > 0 && !slices.ContainsFunc(o.Filter.Verdicts, func(v string) bool { return v != "forwarded" }) {
				return usagef("--last shows what did not pass, and --verdict asks for what is forwarded alone; leave one out")
			}
			o.Once = o.Last > 0 && !follow
			if o.Sample > 1 && (o.Once || len(o.Filter.Verdicts) > 0 && !slices.Contains(o.Filter.Verdicts, "forwarded") || len(o.Filter.Reasons) > 0) {
				return usagef("--sample is of the flows that pass, and only what does not is asked for; leave it out")
			}
			o.Notify = g.notify
			return watch(cmd.Context(), g, cmd.OutOrStdout(), o)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Filter.Pods, "pod", nil, "of either end: namespace/name, or name")
	f.StringSliceVar(&o.Filter.Namespaces, "namespace", nil, "of either end")
	f.StringSliceVar(&o.Filter.Services, "service", nil, "by number, address, or address:port")
	f.StringSliceVar(&o.Filter.Verdicts, "verdict", nil, "forwarded, dropped or refused")
	f.StringSliceVar(&o.Filter.Reasons, "reason", nil, "of a drop: docs/reasons.md lists them")
	f.StringSliceVar(&o.Filter.Protocols, "protocol", nil, "tcp, udp, icmp, icmpv6 …")
	f.UintSliceVar(&ports, "port", nil, "of either end, or of the Service")
	f.StringSliceVar(&o.Filter.From, "from", nil, "the sender: pod, address or prefix")
	f.StringSliceVar(&o.Filter.To, "to", nil, "the receiver: pod, address or prefix, or the Service's address")
	f.IntVar(&o.Last, "last", 0, "show the last so many packets that did not pass, and end")
	f.BoolVar(&follow, "follow", false, "with --last: go on with what comes")
	f.Uint32Var(&o.Sample, "sample", 1, "of the flows that pass, show one of so many")
	refuseEmpty(f)
	return cmd
}

func watch(ctx context.Context, g *globals, w io.Writer, o observe.WatchOptions) error {
	n, err := observe.Open(g.BPFFS, g.StateDir)
	if err != nil {
		return err
	}
	p := flowPrinter{w: w, output: g.Output}
	return errors.Join(n.Watch(ctx, o, p.print), n.Close())
}

// flowPrinter writes one line a flow. Columns grow with what they have held, so
// that lines stay aligned without knowing what comes.
type flowPrinter struct {
	w        io.Writer
	output   string
	src, dst int
}

func (p *flowPrinter) print(f observe.Flow) error {
	switch p.output {
	case "json":
		return json.NewEncoder(p.w).Encode(f)
	case "yaml":
		text, err := yaml.Marshal(f)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(p.w, "---\n%s", text)
		return err
	}
	what := f.Verdict
	if f.Event == observe.Closed {
		what = f.Event
	}
	line := fmt.Sprintf("%s  %-9s  %-6s  %s  →  %s  %s", clock(f.Time, time.Now()), what, f.Protocol,
		pad(f.Source.String(), &p.src), pad(f.Destination.String(), &p.dst), flowDetail(f, p.output == "wide"))
	_, err := fmt.Fprintln(p.w, strings.TrimRight(line, " "))
	return err
}

// clock is a time of day, with the day unless that is today.
func clock(t, now time.Time) string {
	if t.Format(time.DateOnly) == now.Format(time.DateOnly) {
		return t.Format("15:04:05.000")
	}
	return t.Format("2006-01-02 15:04:05.000")
}

const widest = 60

func pad(s string, width *int) string {
	n := utf8.RuneCountInString(s)
	*width = max(*width, min(n, widest))
	return s + strings.Repeat(" ", max(0, *width-n))
}

// flowDetail is the rest of the line: the Service, the reason, and in wide
// output what would let it pass.
func flowDetail(f observe.Flow, wide bool) string {
	var parts []string
	if f.Service != nil {
		parts = append(parts, "by "+f.Service.String())
	}
	for _, j := range f.Policy {
		if wide || j.Denied() {
			parts = append(parts, j.String())
		}
	}
	if f.Event == observe.Stopped {
		parts = append(parts, f.Sentence+" ("+f.Reason+")")
		if hook := f.Hook.Name(); hook != "" && hook != f.Source.Name() && hook != f.Destination.Name() {
			parts = append(parts, "at "+hook)
		}
		if wide && f.SourceMAC != "" {
			parts = append(parts, "from "+f.SourceMAC)
		}
		if wide {
			parts = append(parts, "mend: "+f.Mend)
		}
	}
	if strings.Contains(f.TCPFlags, "rst") && f.Event == observe.Closed {
		parts = append(parts, "by a reset")
	}
	return strings.Join(parts, "; ")
}
