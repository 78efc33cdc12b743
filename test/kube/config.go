// SPDX-License-Identifier: Apache-2.0

// Package kube runs a real Kubernetes on one machine: etcd, an API server,
// controllers, and nodes with their own kubelet and containerd, each in
// namespaces of its own. The machine around it stays as it was, and several
// clusters can run beside each other.
//
// docs/test-kube.md is the page for users. A program that calls Up must call
// RunMachine first in its main (a test: in TestMain).
package kube

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Version is the Kubernetes version that the modules under modules/ pin.
const Version = "v1.34.4"

// ControlPlane is the machine's name that etcd, the API server, the controller
// manager and the scheduler run on. It is no node: no pod runs there.
const ControlPlane = "cp"

// CNI says what connects pods when Up returns.
type CNI string

const (
	NoCNI     CNI = "none"   // nothing: nodes stay NotReady until a network is installed
	BridgeCNI CNI = "bridge" // the reference plugins: bridge, host-local, portmap; routes between nodes
)

// Proxy says what implements Services.
type Proxy string

const (
	NoProxy       Proxy = "none"
	ProxyIptables Proxy = "iptables" // kube-proxy, by Debian's iptables: iptables-nft
	ProxyNftables Proxy = "nftables" // kube-proxy
)

// Config is what a cluster is made from. The zero value of each field means
// what its comment says.
type Config struct {
	Name      string   // "kube"
	Nodes     int      // 2
	DualStack bool     // IPv4 only; true: IPv6 as second family
	CNI       CNI      // bridge
	Proxy     Proxy    // nftables
	Binds     []string // directories of this machine that nodes see as well, at the same place
}

// Addresses. Every cluster has the same ones: each lives in namespaces of its own.
var (
	controlPlane4 = netip.MustParseAddr("10.89.0.1")
	controlPlane6 = netip.MustParseAddr("fd00:10:89::1")
	nodeNet4      = netip.MustParsePrefix("10.89.0.0/24")
	nodeNet6      = netip.MustParsePrefix("fd00:10:89::/64")
)

const (
	podCIDR4     = "10.244.0.0/16"
	podCIDR6     = "fd00:10:244::/56"
	serviceCIDR4 = "10.96.0.0/16"
	serviceCIDR6 = "fd00:10:96::/112"
	kubernetesIP = "10.96.0.1"
	dnsIP        = "10.96.0.10"
	apiServer    = "https://10.89.0.1:6443"
	maxNodes     = 9
)

var validName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?$`)

func (c Config) withDefaults() (Config, error) {
	c.Name = cmp.Or(c.Name, "kube")
	c.Nodes = cmp.Or(c.Nodes, 2)
	c.CNI = cmp.Or(c.CNI, BridgeCNI)
	c.Proxy = cmp.Or(c.Proxy, ProxyNftables)
	if !validName.MatchString(c.Name) {
		return c, fmt.Errorf("cluster name %q: want at most 30 of a-z, 0-9 and -", c.Name)
	}
	if c.Nodes < 1 || c.Nodes > maxNodes {
		return c, fmt.Errorf("%d nodes: want 1 to %d", c.Nodes, maxNodes)
	}
	if !slices.Contains([]CNI{NoCNI, BridgeCNI}, c.CNI) {
		return c, fmt.Errorf("cni %q: want none or bridge", c.CNI)
	}
	if !slices.Contains([]Proxy{NoProxy, ProxyIptables, ProxyNftables}, c.Proxy) {
		return c, fmt.Errorf("proxy %q: want none, iptables or nftables", c.Proxy)
	}
	for i, dir := range c.Binds {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return c, err
		}
		c.Binds[i] = abs
	}
	return c, nil
}

func (c Config) nodes() []string {
	names := make([]string, c.Nodes)
	for i := range names {
		names[i] = fmt.Sprintf("n%d", i+1)
	}
	return names
}

func (c Config) machines() []string { return append([]string{ControlPlane}, c.nodes()...) }

// families joins the IPv4 value and, on a dual-stack cluster, the IPv6 one in
// the way that Kubernetes' flags want them.
func (c Config) families(v4, v6 string) string {
	if c.DualStack {
		return v4 + "," + v6
	}
	return v4
}

// address4 is a machine's address on the wire between the machines.
func address4(machine string) netip.Addr { return address(controlPlane4, machine) }

// address6 is its second one. It exists without dual stack as well: unused,
// but one thing less that differs.
func address6(machine string) netip.Addr { return address(controlPlane6, machine) }

// address counts from the control plane's address: n1 has the tenth after it.
func address(base netip.Addr, machine string) netip.Addr {
	if machine == ControlPlane {
		return base
	}
	var n byte
	if _, err := fmt.Sscanf(machine, "n%d", &n); err != nil {
		panic("no machine's name: " + machine)
	}
	raw := base.AsSlice()
	raw[len(raw)-1] += 9 + n
	addr, _ := netip.AddrFromSlice(raw)
	return addr
}

// Root finds the repository that the current directory lies in.
func Root() (string, error) {
	if root := os.Getenv("MUSTANG_KUBE_ROOT"); root != "" {
		return root, nil
	}
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module github.com/mustang-net/mustang\n") {
			return dir, nil
		}
	}
	return "", fmt.Errorf("not inside mustang's repository; go there, or name it in MUSTANG_KUBE_ROOT")
}

// Cache is where built programs and images are kept: the user's, not the
// repository's, so that the next checkout finds them.
func Cache() (string, error) {
	if dir := os.Getenv("MUSTANG_KUBE_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a place for what is built (MUSTANG_KUBE_CACHE names one): %w", err)
	}
	return filepath.Join(dir, "mustang/kube"), nil
}

// runRoot is where clusters live, one directory each. It is the machine's, not
// the repository's, so that every checkout sees every cluster.
func runRoot() string {
	return cmp.Or(os.Getenv("MUSTANG_KUBE_RUN"), "/var/lib/mustang-kube")
}
