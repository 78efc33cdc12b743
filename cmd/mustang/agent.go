// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/agent"
	"github.com/mustang-net/mustang/internal/engine"
)

func newAgentCmd(g *globals) *cobra.Command {
	given := agent.Config{}
	var file string
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Follow Kubernetes, and give this node its Services and NetworkPolicies",
		Long: `Follows the API server and keeps this node's Services and NetworkPolicies as it says, until it is
told to stop. What is at work stays at work when the agent ends, however it ends.
Settings come from flags, then from --config, then from defaults.`,
		Example: "  mustang agent --kubeconfig /etc/kubernetes/agent.conf --api-server 10.0.0.1:6443 --node n1",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := agentConfig(cmd, g, given, file)
			if err != nil {
				return usageError{err}
			}
			log, err := config.Logger()
			if err != nil {
				return usageError{err}
			}
			a, err := agent.New(cmd.Context(), config, log, runCall)
			if err != nil {
				return err
			}
			return a.Run(cmd.Context())
		},
	}
	cmd.AddCommand(newAgentHealthCmd(g))
	d := agent.Defaults()
	f := cmd.Flags()
	f.StringVar(&file, "config", "", "YAML file with these settings by these names")
	f.StringVar(&given.Node, "node", d.Node, "this node's name in Kubernetes")
	f.StringVar(&given.Kubeconfig, "kubeconfig", "", "file that says where the API server is and who asks (default: the pod's service account)")
	f.StringVar(&given.APIServer, "api-server", "", "HOST:PORT or URL of the API server, in place of the one that the kubeconfig or the pod's environment names")
	f.StringVar(&given.NodeMode, "node-mode", d.NodeMode, "how pods of other nodes are reached: direct, vxlan, or none: somebody else sees to it")
	f.StringVar(&given.HostRouting, "host-routing", d.HostRouting, "who forwards between pods and the wire: ebpf, or legacy: the host's stack, with its firewall")
	f.IntVar(&given.VXLANVNI, "vxlan-vni", d.VXLANVNI, "vxlan: the network's number, the same on every node")
	f.IntVar(&given.VXLANPort, "vxlan-port", d.VXLANPort, "vxlan: the UDP port, the same on every node")
	f.StringSliceVar(&given.NodeDevices, "node-devices", d.NodeDevices, "the links to other nodes; auto: those with a default route, this node's addresses or the ways to others")
	f.StringSliceVar(&given.Devices, "devices", nil, "NICs behind which clients of node ports and external addresses are (default: those with the Node's addresses), or none")
	f.StringSliceVar(&given.NodePortAddresses, "node-port-addresses", nil, "CIDR: only these of the NICs' addresses take node ports (default: all)")
	f.BoolVar(&given.HostServices, "host-services", d.HostServices, "the node's own sockets, and host-network pods, get Services, too")
	f.StringVar(&given.HealthAddress, "health-address", d.HealthAddress, "ADDRESS:PORT of /healthz, /readyz and /livez, or none")
	f.StringVar(&given.MetricsAddress, "metrics-address", d.MetricsAddress, "ADDRESS:PORT of /metrics, or none")
	f.StringVar(&given.CNIConfDir, "cni-conf-dir", d.CNIConfDir, "where the container runtime looks for networks: the agent's list goes there when it is ready; none: somebody else sees to it")
	f.BoolVar(&given.CNIDisplace, "cni-displace", false, "write the list although another network's is there")
	f.StringVar(&given.StartupTaint, "startup-taint", "", "taint that the agent takes off its node when it is ready")
	f.StringVar(&given.LogLevel, "log-level", d.LogLevel, "debug, info, warn or error")
	return cmd
}

// agentConfig is the defaults, of the scope the environment's, then the file,
// then the flags that were given.
func agentConfig(cmd *cobra.Command, g *globals, given agent.Config, file string) (agent.Config, error) {
	c := agent.Defaults()
	c.BPFFS, c.StateDir, c.CgroupRoot = g.BPFFS, g.StateDir, g.CgroupRoot
	if file != "" {
		var err error
		if c, err = c.Read(file); err != nil {
			return c, err
		}
	}
	given.BPFFS, given.StateDir, given.CgroupRoot = g.BPFFS, g.StateDir, g.CgroupRoot
	for name, setting := range map[string]struct{ to, from *string }{
		"node": {&c.Node, &given.Node}, "kubeconfig": {&c.Kubeconfig, &given.Kubeconfig}, "api-server": {&c.APIServer, &given.APIServer},
		"bpffs": {&c.BPFFS, &given.BPFFS}, "state-dir": {&c.StateDir, &given.StateDir}, "cgroup-root": {&c.CgroupRoot, &given.CgroupRoot},
		"health-address": {&c.HealthAddress, &given.HealthAddress}, "metrics-address": {&c.MetricsAddress, &given.MetricsAddress},
		"node-mode": {&c.NodeMode, &given.NodeMode}, "log-level": {&c.LogLevel, &given.LogLevel},
		"host-routing": {&c.HostRouting, &given.HostRouting},
		"cni-conf-dir": {&c.CNIConfDir, &given.CNIConfDir}, "startup-taint": {&c.StartupTaint, &given.StartupTaint},
	} {
		if cmd.Flags().Changed(name) {
			*setting.to = *setting.from
		}
	}
	for name, setting := range map[string]struct{ to, from *[]string }{
		"devices": {&c.Devices, &given.Devices}, "node-port-addresses": {&c.NodePortAddresses, &given.NodePortAddresses},
		"node-devices": {&c.NodeDevices, &given.NodeDevices},
	} {
		if cmd.Flags().Changed(name) {
			*setting.to = *setting.from
		}
	}
	for name, setting := range map[string]struct{ to, from *int }{
		"vxlan-vni": {&c.VXLANVNI, &given.VXLANVNI}, "vxlan-port": {&c.VXLANPort, &given.VXLANPort},
	} {
		if cmd.Flags().Changed(name) {
			*setting.to = *setting.from
		}
	}
	if cmd.Flags().Changed("cni-displace") {
		c.CNIDisplace = given.CNIDisplace
	}
	if cmd.Flags().Changed("host-services") {
		c.HostServices = given.HostServices
	}
	return c, c.Check()
}

// agents are the commands that need the scope's engine: where an agent holds
// it, the agent runs them.
var agents = map[string]bool{"svc": true, "ep": true, "pod": true, "status": true, "node": true, "policy": true, "edge": true}

// answered ends a command that the agent has run.
type answered struct{ agent.Answer }

func (a answered) Error() string { return fmt.Sprintf("the agent's answer has status %d", a.Code) }

// delegate has the agent of the scope run the command, if there is one: then
// the answer is the error. nil: run it here.
func (g *globals) delegate(cmd *cobra.Command, args []string) error {
	top := cmd
	for top.HasParent() && top.Parent().HasParent() {
		top = top.Parent()
	}
	if f := cmd.Flags().Lookup("cluster"); g.shared != nil || !agents[top.Name()] || f != nil && f.Value.String() == "true" {
		return nil
	}
	if err := cmd.ValidateArgs(args); err != nil {
		return err
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	// The scope goes with the call: the agent's environment may name another.
	args = append([]string{"--bpffs=" + g.BPFFS, "--state-dir=" + g.StateDir, "--cgroup-root=" + g.CgroupRoot}, os.Args[1:]...)
	call := agent.Call{Args: args, BPFFS: g.BPFFS, Dir: dir}
	for _, name := range []string{"file", "filename"} {
		f := cmd.Flags().Lookup(name)
		if f == nil || f.Value.String() == "" {
			continue
		}
		text, err := g.readFile(f.Value.String(), input(cmd))
		if err != nil {
			return nil // the command meets the error again, and tells
		}
		call.Files = map[string][]byte{f.Value.String(): text}
		g.files = call.Files
	}
	answer, err := askAgent(cmd.Context(), g.scope(), call, g.notify)
	if errors.Is(err, agent.ErrNoAgent) {
		return nil
	}
	if err != nil {
		return err
	}
	return answered{answer}
}

// starting is how long an agent that holds the scope may take to listen.
const starting = 5 * time.Second

// askAgent asks. An agent that holds the scope and does not listen yet is
// waited for; so is, for as long, another tool, which does not matter.
func askAgent(ctx context.Context, scope engine.Scope, call agent.Call, notify func(string)) (agent.Answer, error) {
	for deadline := time.Now().Add(starting); ; time.Sleep(10 * time.Millisecond) {
		answer, err := agent.Ask(ctx, scope.StateDir, call, notify)
		if !errors.Is(err, agent.ErrNoAgent) || !scope.Held() || time.Now().After(deadline) || ctx.Err() != nil {
			return answer, err
		}
	}
}

// runCall runs a call in the agent, as the same command would run by itself.
func runCall(ctx context.Context, e *engine.Engine, call agent.Call) (rest func() agent.Answer) {
	var out, errs bytes.Buffer
	g := &globals{shared: e, files: call.Files, dir: call.Dir, warnings: &errs}
	cmd := newRoot(g)
	cmd.SetArgs(call.Args)
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetIn(bytes.NewReader(nil))
	e.ResetRemoved = false
	err := cmd.ExecuteContext(ctx)
	e.ResetRemoved = false
	return func() agent.Answer {
		if err == nil && g.left != nil {
			err = g.left()
		}
		code := tell(&errs, err)
		return agent.Answer{Out: out.Bytes(), Err: errs.Bytes(), Code: code}
	}
}

// readFile is the content of a file that the command line names, - for standard
// input. In an agent it is what the tool has read.
func (g *globals) readFile(name string, stdin io.Reader) ([]byte, error) {
	if text, ok := g.files[name]; ok {
		return text, nil
	}
	if name == "-" {
		return io.ReadAll(stdin)
	}
	return os.ReadFile(g.path(name))
}

// fileName is how a sentence calls a file of the command line.
func fileName(name string) string {
	if name == "-" {
		return "standard input"
	}
	return name
}

// path is a path of the command line, which begins where the tool was called.
func (g *globals) path(name string) string {
	if g.dir == "" || name == "" || filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(g.dir, name)
}
