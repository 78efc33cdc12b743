// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

// Proxy is one that was started. Its rules stay when it has ended, and can still be read.
type Proxy struct {
	kind Kind
	node *lab.Node
	cmd  *lab.Cmd
	env  []string // for the tools that load its rules
	log  string
}

// Options say how it is started.
type Options struct {
	Kind Kind
	Node string // its object exists and has an address: else kube-proxy waits 30 s for one
	Dir  string // for its files
	// MasqueradeAll is for pods that would answer each other directly, not by the node.
	MasqueradeAll bool
}

// Start starts it on the node of the API server.
func Start(ctx context.Context, n *lab.Node, api *kube.APIServer, o Options) (*Proxy, error) {
	p := &Proxy{kind: o.Kind, node: n, log: filepath.Join(o.Dir, "kube-proxy.log")}
	// nf_conntrack_max cannot be set in a network namespace: 0 leaves it alone.
	text := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: %s}
mode: %s
clusterCIDR: %s,%s
hostnameOverride: %s
metricsBindAddress: %s
oomScoreAdj: 0
conntrack: {maxPerCore: 0, min: 0}
iptables: {masqueradeAll: %v}
nftables: {masqueradeAll: %[7]v}
`, api.Kubeconfig, o.Kind.Mode(), lab.PodCIDR4, lab.PodCIDR6, o.Node, metricsAddress, o.MasqueradeAll)
	config := filepath.Join(o.Dir, "kube-proxy.yaml")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	if o.Kind.Mode() == "iptables" {
		var err error
		if p.env, err = iptables(o.Kind, o.Dir); err != nil {
			return nil, err
		}
	}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// Not by ctx: when that ends, it is to be asked what it is doing.
	p.cmd = n.Command(context.WithoutCancel(ctx), filepath.Join(api.Programs, "kube-proxy"), "--config", config)
	p.cmd.Env = append(p.cmd.Env, p.env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start kube-proxy: %w", err)
	}
	return p, nil
}

// iptables makes the backend what a program finds that looks for iptables.
func iptables(k Kind, dir string) (env []string, err error) {
	bin := filepath.Join(dir, k.backend())
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return nil, err
	}
	for _, v6 := range []bool{false, true} {
		for _, action := range []string{"", "save", "restore"} {
			tool := k.tool(v6, action)
			path, err := exec.LookPath(tool)
			if err != nil {
				return nil, fmt.Errorf("%s needs %s: install iptables (%w)", k, tool, errors.ErrUnsupported)
			}
			// They are one program, which goes by its name.
			name := strings.Replace(tool, strings.TrimPrefix(k.backend(), "iptables"), "", 1)
			if err := os.Symlink(path, filepath.Join(bin, name)); err != nil {
				return nil, err
			}
		}
	}
	// The lock of iptables-legacy is one file for the whole machine, and it stays.
	return []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "XTABLES_LOCKFILE=" + filepath.Join(dir, "xtables.lock")}, nil
}

// PID is its process's.
func (p *Proxy) PID() int { return p.cmd.Process.Pid }

// Doing says what it is doing.
func (p *Proxy) Doing() string { return kube.Doing("kube-proxy", p.PID(), p.log) }

// End ends it. What it has started may go on: the lab ends that.
func (p *Proxy) End() {
	_ = p.cmd.Process.Signal(os.Interrupt)
	_ = p.cmd.Wait() // its status is the signal's
}
