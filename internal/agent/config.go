// SPDX-License-Identifier: Apache-2.0

// Package agent is one node's agent: it follows Kubernetes, keeps the engine,
// and answers the CNI plugin, the command line, health checks and scrapes.
// Everything is put together by plain constructors in New.
package agent

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/node"
	"github.com/mustang-net/mustang/internal/policy/manifest"
	"github.com/mustang-net/mustang/internal/state"
)

// Config is all settings of an agent. Its file is YAML with these names; each
// has a flag of the same name that goes before the file.
type Config struct {
	// Node is this node's name in Kubernetes.
	Node string `json:"node,omitempty"`
	// Kubeconfig is a file; "" is the pod's service account.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// APIServer is HOST:PORT or a URL, in place of the one that Kubeconfig or
	// the pod's environment names.
	APIServer string `json:"api-server,omitempty"`

	// NodeMode is how the pods of other nodes are reached: direct, vxlan, or none:
	// somebody else sees to it.
	NodeMode string `json:"node-mode,omitempty"`
	// HostRouting, VXLANVNI, VXLANPort and NodeDevices are what `mustang node set` says
	// beside an agent: who forwards between pods and the wire (ebpf, legacy), the tunnel's
	// number and UDP port, and the links to other nodes (auto alone: as found).
	HostRouting string   `json:"host-routing,omitempty"`
	VXLANVNI    int      `json:"vxlan-vni,omitempty"`
	VXLANPort   int      `json:"vxlan-port,omitempty"`
	NodeDevices []string `json:"node-devices,omitempty"`

	// Devices are the NICs behind which clients outside the cluster are: of node
	// ports, external and load balancer addresses. Empty: those with the Node's
	// addresses; none alone: no such clients are served.
	Devices []string `json:"devices,omitempty"`
	// NodePortAddresses are CIDRs: only these of the NICs' addresses take node
	// ports. Empty: all.
	NodePortAddresses []string `json:"node-port-addresses,omitempty"`
	// HostServices gives Services to the node's own sockets, too.
	HostServices bool `json:"host-services"`

	// CNIConfDir is where the container runtime looks for networks: the agent
	// writes its network list there as soon as pods can be given what they need.
	// None: somebody else writes it.
	CNIConfDir string `json:"cni-conf-dir,omitempty"`
	// CNIDisplace writes the list although another network's is there.
	CNIDisplace bool `json:"cni-displace,omitempty"`
	// CNI is the plugin's configuration (docs/cni.md). What it leaves out the
	// agent fills in: the node's pod CIDRs as pools, and the scope.
	CNI map[string]any `json:"cni,omitempty"`

	// StartupTaint is the key of the taint that the agent takes off its node when
	// it is ready: until then nothing is scheduled there. "": it looks at none.
	StartupTaint string `json:"startup-taint,omitempty"`

	BPFFS      string `json:"bpffs,omitempty"`
	StateDir   string `json:"state-dir,omitempty"`
	CgroupRoot string `json:"cgroup-root,omitempty"`

	// HealthAddress serves /healthz, /readyz and /livez, MetricsAddress /metrics: those
	// of kube-proxy, so that load balancers and dashboards find them. "none" is
	// nowhere.
	HealthAddress  string `json:"health-address,omitempty"`
	MetricsAddress string `json:"metrics-address,omitempty"`

	// LogLevel is debug, info, warn or error.
	LogLevel string `json:"log-level,omitempty"`

	file string // that was read
	text []byte // what it said
}

// None is an address that is not listened on, a NodeMode, and no Devices.
const None = "none"

// Defaults are the settings that nobody gave.
func Defaults() Config {
	name := os.Getenv("NODE_NAME")
	if name == "" {
		name, _ = os.Hostname()
		name = strings.ToLower(name)
	}
	return Config{
		Node: name, BPFFS: engine.DefaultBPFFS, StateDir: engine.DefaultStateDir, CNIConfDir: None,
		HealthAddress: "[::]:10256", MetricsAddress: "127.0.0.1:10249", LogLevel: "info", NodeMode: string(state.NodeDirect), HostServices: true,
		HostRouting: string(state.RoutingEBPF), VXLANVNI: node.DefaultVNI, VXLANPort: node.DefaultPort, NodeDevices: []string{node.AutoDevices},
	}
}

// Read puts the settings of a file over those of c. A name that is not a
// setting is an error: what was meant by it would silently not be so.
func (c Config) Read(path string) (Config, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	c.file, c.text = path, text
	if text, err = manifest.One(text); err != nil {
		return c, fmt.Errorf("configuration %s: %w: put all settings into one", path, err)
	}
	if err := yaml.UnmarshalStrict(text, &c); err != nil {
		return c, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

// changed says that the file is not what was read. One that cannot be read says nothing.
func (c Config) changed() bool {
	if c.file == "" {
		return false
	}
	text, err := os.ReadFile(c.file)
	return err == nil && !bytes.Equal(text, c.text)
}

// Check answers every wrong setting by a sentence.
func (c Config) Check() error {
	var errs []error
	if c.Node == "" {
		errs = append(errs, errors.New("node is empty; give this node's name as `kubectl get nodes` shows it"))
	}
	if c.Kubeconfig != "" {
		if _, err := os.Stat(c.Kubeconfig); err != nil {
			errs = append(errs, fmt.Errorf("kubeconfig: %w; give an existing file, or none in a pod", err))
		}
	}
	for _, dir := range []struct{ name, value string }{{"bpffs", c.BPFFS}, {"state-dir", c.StateDir}, {"cgroup-root", c.CgroupRoot}, {"cni-conf-dir", c.CNIConfDir}} {
		if dir.value == "" && dir.name == "cgroup-root" || dir.value == None && dir.name == "cni-conf-dir" {
			continue
		}
		if !strings.HasPrefix(dir.value, "/") {
			errs = append(errs, fmt.Errorf("%s %q is not an absolute path", dir.name, dir.value))
		}
	}
	errs = append(errs, k8s.CheckServer(c.APIServer))
	errs = append(errs, checkAddress("health-address", c.HealthAddress), checkAddress("metrics-address", c.MetricsAddress))
	if !slices.Contains([]string{string(state.NodeDirect), string(state.NodeVXLAN), None}, c.NodeMode) {
		errs = append(errs, fmt.Errorf("node-mode %q is none of direct, vxlan, none", c.NodeMode))
	}
	errs = append(errs, c.checkSettings())
	if _, err := c.prefixes(); err != nil {
		errs = append(errs, err)
	}
	if len(c.Devices) > 1 && slices.Contains(c.Devices, None) {
		errs = append(errs, errors.New("devices has none beside others; give one or the other"))
	}
	if _, err := c.level(); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, c.checkCNI())
	return errors.Join(errs...)
}

// settings are this node's own, between nodes.
func (c Config) settings() node.SettingsSpec {
	return node.SettingsSpec{HostRouting: c.HostRouting, Devices: c.NodeDevices, VNI: c.VXLANVNI, Port: c.VXLANPort}
}

// named are the devices that each setting names.
func (c Config) named() map[string][]string {
	out := map[string][]string{}
	if !slices.Contains(c.Devices, None) {
		out["devices"] = c.Devices
	}
	if c.NodeMode != None && !slices.Contains(c.NodeDevices, node.AutoDevices) {
		out["node-devices"] = c.NodeDevices
	}
	return out
}

// checkSettings refuses, beside what is wrong, what would keep a value of before.
func (c Config) checkSettings() error {
	var errs []error
	if c.HostRouting == "" {
		errs = append(errs, errors.New("host-routing is empty: use ebpf or legacy"))
	}
	if c.VXLANVNI == 0 || c.VXLANPort == 0 {
		errs = append(errs, errors.New("0 is out of range for vxlan-vni and vxlan-port, which begin at 1"))
	}
	if len(c.NodeDevices) == 0 || len(c.NodeDevices) > 1 && slices.Contains(c.NodeDevices, node.AutoDevices) {
		errs = append(errs, errors.New("node-devices is neither auto alone nor interfaces of this node"))
	}
	for name, one := range map[string]node.SettingsSpec{"host-routing": {HostRouting: c.HostRouting}, "vxlan-vni": {VNI: c.VXLANVNI}, "vxlan-port": {Port: c.VXLANPort}} {
		if _, err := one.Apply(node.DefaultSettings()); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func checkAddress(name, value string) error {
	if value == None {
		return nil
	}
	if a, err := netip.ParseAddrPort(value); err != nil || a.Port() == 0 || a.Addr().Zone() != "" {
		return fmt.Errorf("%s %q is neither ADDRESS:PORT nor none; write it like 127.0.0.1:10249 or [::]:10256", name, value)
	}
	return nil
}

// prefixes are the addresses that take node ports.
func (c Config) prefixes() ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range c.NodePortAddresses {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("node-port-addresses %q is not a CIDR, as 192.0.2.0/24", s)
		}
		out = append(out, p)
	}
	return out, nil
}

func (c Config) level() (slog.Level, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return l, fmt.Errorf("log-level %q is none of debug, info, warn, error", c.LogLevel)
	}
	return l, nil
}

// Logger writes what the agent tells, one line each.
func (c Config) Logger() (*slog.Logger, error) {
	level, err := c.level()
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})), err
}

func (c Config) scope() engine.Scope {
	return engine.Scope{BPFFS: c.BPFFS, StateDir: c.StateDir, CgroupRoot: c.CgroupRoot}
}

func (c Config) access() k8s.Access { return k8s.Access{Kubeconfig: c.Kubeconfig, Server: c.APIServer} }
