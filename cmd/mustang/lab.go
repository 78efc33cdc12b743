// SPDX-License-Identifier: Apache-2.0

package main

// mustang lab: a node with pods on this machine, to look at and to try on.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/lab"
)

const (
	labVIPPort     = 80
	labBackendPort = 8080
)

// labFlags describe a lab to build.
type labFlags struct {
	cfg            lab.Config
	mode, services string
	pods           int // on each node
	join           lab.Join
}

func newLabCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{Use: "lab", Short: "Build a node with pods in network namespaces, to try things on"}
	cmd.AddCommand(newLabUpCmd(g), newLabRunCmd(), newLabLsCmd(g), newLabGCCmd())
	return cmd
}

func (f *labFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.cfg.Name, "name", "demo", "1 to 6 lower-case letters and digits")
	fl.StringVar(&f.mode, "mode", string(lab.Veth), fmt.Sprintf("how pods are connected: one of %v", lab.Modes))
	fl.StringVar(&f.services, "services", string(lab.Mustang), fmt.Sprintf("what implements Services: one of %v", lab.ServiceBys))
	fl.IntVar(&f.pods, "pods", 2, "how many on each node, named p1, p2, …")
	fl.IntVar(&f.cfg.Nodes, "nodes", 1, "how many, named n1, n2, …; two are joined by a wire, more by a switch")
	fl.StringVar(&f.join.Mode, "join", "direct", "how several nodes reach each other's pods: direct or vxlan")
	fl.StringVar(&f.join.HostRouting, "host-routing", "ebpf", "several nodes: who forwards between pods and the wire: ebpf or legacy")
	fl.IntVar(&f.cfg.MTU, "mtu", 1500, "of all links, in bytes")
	fl.StringVar(&f.cfg.LocalMTU, "local-mtu", "auto", "between pods with mustang's Services: auto, off or bytes")
	fl.IntVar(&f.cfg.BigTCP, "big-tcp", 0, "bundle TCP segments to this many bytes; 0: the kernel's 65536")
	fl.BoolVar(&f.cfg.BridgeNF, "bridge-nf", true, "bridge mode: bridged packets pass iptables")
}

func newLabUpCmd(g *globals) *cobra.Command {
	var f labFlags
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Build a lab and keep it until Ctrl-C",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.withLab(cmd, func(ctx context.Context, l *lab.Lab) error {
				if err := labDescribe(cmd.OutOrStdout(), g, l, f); err != nil {
					return err
				}
				<-ctx.Done()
				return nil
			})
		},
	}
	f.register(cmd)
	return cmd
}

func newLabRunCmd() *cobra.Command {
	var f labFlags
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Build a lab, run a command on its node, remove the lab",
		Long: `Build a lab, run a command in its node's network namespace, remove the lab.
The command finds in its environment: LAB_NODE_NETNS, LAB_OUT_NETNS, LAB_VIP4,
LAB_VIP6, LAB_BPFFS, LAB_STATE_DIR, LAB_PODS, and for each pod, by its name in
capitals, LAB_P1_NETNS, LAB_P1_IPV4, LAB_P1_IPV6; and the node's scope, so that
mustang in it is that node's. Its exit code is passed on.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.withLab(cmd, func(ctx context.Context, l *lab.Lab) error {
				c := l.Node().Command(ctx, args...)
				c.Stdin, c.Stdout, c.Stderr = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
				c.Env = append(c.Env, labEnv(l)...)
				if err := c.Run(); err != nil {
					return passedOn{fmt.Errorf("%s: %w", args[0], err), c.ProcessState.ExitCode()}
				}
				return nil
			})
		},
	}
	f.register(cmd)
	return cmd
}

// passedOn is the end of the user's own command.
type passedOn struct {
	error
	code int
}

func (p passedOn) ExitCode() int { return p.code }
func (p passedOn) Unwrap() error { return p.error }

func newLabLsCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the labs on this machine",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := lab.List()
			if err != nil {
				return err
			}
			return g.print(cmd.OutOrStdout(), all, func(w io.Writer) {
				row(w, "NAME", "MODE", "SERVICES", "OWNER", "NETNS", "STATE")
				for _, i := range all {
					how := "running"
					if !i.Alive {
						how = "dead: mustang lab gc removes it"
					}
					row(w, i.Name, i.Mode, i.Services, i.PID, len(i.NetNS), how)
				}
			})
		},
	}
}

func newLabGCCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "gc",
		Short: "Remove labs whose owner is dead",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			swept, err := lab.GC()
			for _, name := range swept {
				fmt.Fprintln(cmd.OutOrStdout(), "removed", name)
			}
			return err
		},
	}
}

// interruptible is a context that ends with Ctrl-C, with SIGTERM, and with the terminal,
// unless nohup says that it does not matter.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ends := []os.Signal{os.Interrupt, unix.SIGTERM}
	if !signal.Ignored(unix.SIGHUP) {
		ends = append(ends, unix.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(ctx, ends...)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// withLab builds, calls fn, and removes the lab whatever happens. A second
// signal while removing ends the process at once; gc then has the rest.
func (f *labFlags) withLab(cmd *cobra.Command, fn func(context.Context, *lab.Lab) error) (err error) {
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	if f.cfg.Nodes < 1 || f.cfg.Nodes > lab.MaxNodes {
		return usagef("--nodes: %d is out of range: use 1 to %d", f.cfg.Nodes, lab.MaxNodes)
	}
	if most := min(1000, lab.MaxPods(f.cfg.Nodes)); f.pods < 0 || f.pods > most {
		return usagef("--pods: %d is out of range: use 0 to %d", f.pods, most)
	}
	if m := state.NodeMode(f.join.Mode); m != state.NodeDirect && m != state.NodeVXLAN {
		return usagef("--join: %q is unknown: use direct or vxlan", f.join.Mode)
	}
	if r := state.HostRouting(f.join.HostRouting); r != state.RoutingEBPF && r != state.RoutingLegacy {
		return usagef("--host-routing: %q is unknown: use ebpf or legacy", f.join.HostRouting)
	}
	f.cfg.Mode, f.cfg.Services = lab.Mode(f.mode), lab.ServiceBy(f.services)
	l, err := lab.New(ctx, f.cfg)
	if err != nil {
		return err
	}
	defer func() {
		stop()
		err = errors.Join(err, l.Close())
	}()
	if err := f.fill(ctx, l, cmd.ErrOrStderr()); err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		return err
	}
	return fn(ctx, l)
}

// fill makes the pods, and one Service a family in front of them.
func (f *labFlags) fill(ctx context.Context, l *lab.Lab, progress io.Writer) error {
	last := time.Now()
	if f.cfg.Nodes > 1 {
		f.join.Kernel = f.plain()
		if err := l.Join(ctx, f.join); err != nil {
			return err
		}
	}
	for i := range f.pods * f.cfg.Nodes {
		// Nodes in turn: p1 on the first, p2 on the second, …
		if _, err := l.Nodes()[i%f.cfg.Nodes].AddPod(ctx, fmt.Sprintf("p%d", i+1)); err != nil {
			return err
		}
		if time.Since(last) > 2*time.Second {
			fmt.Fprintf(progress, "%d of %d pods\n", i+1, f.pods*f.cfg.Nodes)
			last = time.Now()
		}
	}
	if f.cfg.Services == lab.NoServices || f.pods == 0 {
		return nil
	}
	s4 := lab.Service{VIP: lab.VIP4(1), Port: labVIPPort, Protocol: "tcp"}
	s6 := lab.Service{VIP: lab.VIP6(1), Port: labVIPPort, Protocol: "tcp"}
	for _, p := range podsOf(l) {
		if p.Name == "p1" && f.pods*f.cfg.Nodes > 1 {
			continue // the client
		}
		s4.Backends = append(s4.Backends, netip.AddrPortFrom(p.IPv4, labBackendPort))
		s6.Backends = append(s6.Backends, netip.AddrPortFrom(p.IPv6, labBackendPort))
	}
	for _, n := range l.Nodes() {
		if err := n.AddServices(ctx, []lab.Service{s4, s6}); err != nil {
			return err
		}
	}
	return nil
}

// plain says that pods are without mustang.
func (f *labFlags) plain() bool {
	return f.cfg.Services != lab.Mustang && f.cfg.Services != lab.MustangTC && f.cfg.Services != lab.MustangSocket
}

// podsOf are the pods of all nodes.
func podsOf(l *lab.Lab) (out []*lab.Pod) {
	for _, n := range l.Nodes() {
		out = append(out, n.Pods()...)
	}
	return out
}

// labSpace is a line of what lab up prints.
type labSpace struct {
	Name  string     `json:"name"`
	NetNS string     `json:"netns"`
	IPv4  netip.Addr `json:"ipv4"`
	IPv6  netip.Addr `json:"ipv6"`
}

func labDescribe(w io.Writer, g *globals, l *lab.Lab, f labFlags) error {
	n, out := l.Node(), l.Outside()
	spaces := []labSpace{{"outside", out.NetNS, out.IPv4, out.IPv6}}
	for _, n := range l.Nodes() {
		spaces = append(spaces, labSpace{"node " + n.Name, n.NetNS, n.IPv4, n.IPv6})
	}
	pods := podsOf(l)
	for _, p := range pods {
		spaces = append(spaces, labSpace{p.Name, p.NetNS, p.IPv4, p.IPv6})
	}
	err := g.print(w, spaces, func(w io.Writer) {
		row(w, "NAME", "NETNS", "IPV4", "IPV6")
		for _, s := range spaces {
			row(w, s.Name, filepath.Base(s.NetNS), s.IPv4, s.IPv6)
		}
	})
	if err != nil || g.Output == "json" || g.Output == "yaml" {
		return err
	}
	fmt.Fprintf(w, "\nlab %s is up: pods by %s, Services by %s. Ctrl-C removes it.\n", l.Name(), f.mode, f.services)
	if len(pods) == 0 {
		return nil
	}
	client, server := pods[0], pods[len(pods)-1]
	fmt.Fprintf(w, "\nA server, in another terminal:\n  ip netns exec %s python3 -m http.server %d --bind ::\n", filepath.Base(server.NetNS), labBackendPort)
	fmt.Fprintf(w, "By pod address, and from outside:\n  ip netns exec %s curl http://%s:%d/\n  ip netns exec %s curl 'http://[%s]:%d/'\n",
		filepath.Base(client.NetNS), server.IPv4, labBackendPort, filepath.Base(out.NetNS), server.IPv6, labBackendPort)
	if f.cfg.Services != lab.NoServices {
		fmt.Fprintf(w, "By Service:\n  ip netns exec %s curl http://%s:%d/\n", filepath.Base(client.NetNS), lab.VIP4(1), labVIPPort)
	}
	_, err = fmt.Fprintf(w, "mustang on this node:\n  nsenter --net=%s %s pod ls\n", n.NetNS, strings.Join(l.MustangArgs(), " "))
	return err
}

// labEnv is what a command finds in its environment; mustang, the node's scope as its flags' defaults.
func labEnv(l *lab.Lab) []string {
	env := []string{
		"MUSTANG_BPFFS=" + l.BPFFS(), "MUSTANG_STATE_DIR=" + l.StateDir(), "MUSTANG_CGROUP_ROOT=" + l.Node().Cgroup,
		"LAB_NODE_NETNS=" + l.Node().NetNS, "LAB_OUT_NETNS=" + l.Outside().NetNS,
		"LAB_BPFFS=" + l.BPFFS(), "LAB_STATE_DIR=" + l.StateDir(),
		"LAB_VIP4=" + netip.AddrPortFrom(lab.VIP4(1), labVIPPort).String(),
		"LAB_VIP6=" + netip.AddrPortFrom(lab.VIP6(1), labVIPPort).String(),
	}
	names := []string{}
	for _, p := range podsOf(l) {
		key := "LAB_" + strings.ToUpper(p.Name)
		env = append(env, key+"_NETNS="+p.NetNS, key+"_IPV4="+p.IPv4.String(), key+"_IPV6="+p.IPv6.String())
		names = append(names, p.Name)
	}
	return append(env, "LAB_PODS="+strings.Join(names, " "))
}
