// SPDX-License-Identifier: Apache-2.0

// Command kube starts a real Kubernetes on this machine, for tests of a
// network. docs/test-kube.md says how it is used.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/test/kube"
)

func main() {
	kube.RunMachine()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	root := &cobra.Command{
		Use: "kube", Short: "A real Kubernetes " + kube.Version + " on this machine, for tests of a network",
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	var name string
	root.PersistentFlags().StringVar(&name, "name", "kube", "the cluster's name")
	root.AddCommand(
		buildCommand(), upCommand(&name), readyCommand(&name), downCommand(&name),
		enterCommand(&name), kubectlCommand(&name), loadImageCommand(&name),
		powerCommand(&name, "off", "Switch a node off, as a power cut does: its disk stays", kube.Off),
		powerCommand(&name, "on", "Switch it on again", kube.On),
		daemonCommand(&name, "stop", "End a daemon, such as kube-proxy; it stays ended", kube.Stop),
		daemonCommand(&name, "start", "Let it run again", kube.Start),
		e2eCommand(&name), statusCommand(),
	)
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "kube:", err)
		stop()
		os.Exit(1)
	}
}

func buildCommand() *cobra.Command {
	var o kube.BuildOptions
	cmd := &cobra.Command{
		Use: "build", Short: "Build all that a cluster needs, once", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := kube.Build(cmd.Context(), o, cmd.OutOrStdout())
			if errors.Is(err, kube.ErrTime) {
				fmt.Fprintln(cmd.OutOrStdout(), err)
				return nil
			}
			return err
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.E2E, "e2e", false, "the end-to-end suite too")
	f.IntVar(&o.Jobs, "jobs", runtime.NumCPU(), "compilers at once")
	f.DurationVar(&o.Within, "within", 0, "end after that time, which is no error: what is missing is said")
	return cmd
}

func upCommand(name *string) *cobra.Command {
	config := kube.Config{Nodes: 2}
	cni, proxy := string(kube.BridgeCNI), string(kube.ProxyNftables)
	cmd := &cobra.Command{
		Use: "up", Short: "Start a cluster; print its kubeconfig's path", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config.Name, config.CNI, config.Proxy = *name, kube.CNI(cni), kube.Proxy(proxy)
			if err := kube.Up(cmd.Context(), config, cmd.ErrOrStderr()); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), kube.Kubeconfig(*name))
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&config.Nodes, "nodes", config.Nodes, "nodes, 1 to 9")
	f.BoolVar(&config.DualStack, "dual-stack", false, "IPv6 beside IPv4")
	f.StringVar(&cni, "cni", cni, "what connects pods: none or bridge")
	f.StringVar(&proxy, "proxy", proxy, "kube-proxy's mode: none, iptables or nftables")
	f.StringArrayVar(&config.Binds, "bind", nil, "a further directory that nodes see at the same place")
	return cmd
}

func readyCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use: "ready", Short: "After `up --cni none` and your network: install the DNS, wait for nodes and DNS", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return kube.Ready(cmd.Context(), *name) },
	}
}

func downCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use: "down", Short: "End a cluster and remove every trace of it", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return kube.Down(*name) },
	}
}

func enterCommand(name *string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "enter MACHINE -- COMMAND...", Short: "Run a command inside a node (n1, n2, …) or the control plane (cp)",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 2 || len(args) == 2 && args[1] == "--" {
				return errors.New("want a machine and a command")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			command := args[1:]
			if command[0] == "--" {
				command = command[1:]
			}
			return kube.Enter(*name, args[0], command)
		},
	}
	cmd.Flags().SetInterspersed(false)
	return cmd
}

func kubectlCommand(name *string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "kubectl [--name NAME] ARGS...", Short: "Run kubectl",
		RunE: func(_ *cobra.Command, args []string) error { return kube.Kubectl(*name, args) },
	}
	cmd.Flags().SetInterspersed(false) // from the first word on, flags are kubectl's
	return cmd
}

func loadImageCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use: "load-image ARCHIVE", Short: "Give every node the images of an archive", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return kube.LoadImage(cmd.Context(), *name, args[0], cmd.OutOrStdout())
		},
	}
}

func powerCommand(name *string, use, short string, do func(name, node string) error) *cobra.Command {
	return &cobra.Command{
		Use: use + " NODE", Short: short, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error { return do(*name, args[0]) },
	}
}

func daemonCommand(name *string, use, short string, do func(name, machine, daemon string) error) *cobra.Command {
	return &cobra.Command{
		Use: use + " MACHINE DAEMON", Short: short, Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error { return do(*name, args[0], args[1]) },
	}
}

func e2eCommand(name *string) *cobra.Command {
	run := kube.E2E{Focus: kube.ConformanceFocus, Skip: kube.DefaultSkip, Parallel: 4, Timeout: 30 * time.Minute}
	cmd := &cobra.Command{
		Use: "e2e", Short: "Run Kubernetes' own network tests", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			summary, err := kube.RunE2E(cmd.Context(), *name, run, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), summary)
			if summary.Failed > 0 {
				return fmt.Errorf("%d specs failed", summary.Failed)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&run.Focus, "focus", run.Focus, "run the specs that match")
	f.StringVar(&run.Skip, "skip", run.Skip, "but not those")
	f.IntVar(&run.Parallel, "parallel", run.Parallel, "specs at once")
	f.DurationVar(&run.Timeout, "timeout", run.Timeout, "for all")
	f.StringVar(&run.Output, "output", "", "directory for log, JUnit file and summary (default: in the cache)")
	return cmd
}

func statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Which clusters run", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return kube.Status(cmd.OutOrStdout()) },
	}
}
