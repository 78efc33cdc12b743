// SPDX-License-Identifier: Apache-2.0

package lab

// Making a lab, filling it with pods, and taking it down.

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Lab is one node or several, their pods, and an outside that each node has a
// wire to.
type Lab struct {
	cfg     Config
	info    Info
	nodes   []*Node
	outside *Outside

	mu     sync.Mutex
	closed bool
}

// Node is one of the lab's nodes, with its uplink Uplink.
type Node struct {
	Space
	Name             string
	IPv4, IPv6       netip.Addr   // of the uplink
	Wire4, Wire6     netip.Addr   // of Wire; zero when there is one node
	PodNet4, PodNet6 netip.Prefix // its own pods'

	lab      *Lab
	mu       sync.Mutex // what follows
	pods     []*Pod
	nextPod  int
	services map[string]bool // by Service.String
}

// Pod is one pod of a node.
type Pod struct {
	Space
	Name       string
	IPv4, IPv6 netip.Addr

	nic string // host-device: the node's NIC that the pod has
}

// Outside is a machine at the other end of the node's uplink.
type Outside struct {
	Space
	IPv4, IPv6 netip.Addr
}

// New removes what dead labs left, and makes a lab with one node and no pods.
// ctx bounds the making, not the lab's life: that ends with Close, or with this
// process.
func New(ctx context.Context, cfg Config) (l *Lab, err error) {
	if cfg, err = cfg.complete(); err != nil {
		return nil, err
	}
	l = &Lab{cfg: cfg, info: thisOwner(cfg)}
	if err := claim(l.info); err != nil {
		return nil, err
	}
	half := l // returning nil must not lose it
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("build lab %s: %w", cfg.Name, err), half.Close())
			l = nil
		}
	}()
	if err := l.makeDirs(); err != nil {
		return nil, err
	}
	if err := l.makeWorld(); err != nil {
		return nil, err
	}
	return l, ctx.Err()
}

// complete fills in defaults and validates.
func (c Config) complete() (Config, error) {
	if c.Services == "" {
		c.Services = NoServices
	}
	if c.MTU == 0 {
		c.MTU = 1500
	}
	if c.Nodes == 0 {
		c.Nodes = 1
	}
	if err := c.validate(); err != nil {
		return c, configError{err}
	}
	if os.Getuid() != 0 {
		return c, errors.New("a lab makes network namespaces: run it as root")
	}
	var err error
	if c.Binary == "" {
		c.Binary, err = os.Executable()
	} else {
		c.Binary, err = exec.LookPath(c.Binary)
	}
	if err != nil {
		return c, fmt.Errorf("find the mustang binary: %w", err)
	}
	if c.Binary, err = filepath.Abs(c.Binary); err != nil {
		return c, err
	}
	if c.CgroupRoot == "" {
		c.CgroupRoot, err = cgroup2Root()
	} else {
		c.ownCgroups = c.Nodes > 1
	}
	if err != nil && c.Services.servicePath() != "" {
		return c, err
	}
	return c, nil
}

// cgroup2Root finds where the machine has its cgroup v2 tree.
func cgroup2Root() (string, error) {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if m := strings.Fields(s.Text()); len(m) > 2 && m[2] == "cgroup2" {
			return m[1], nil
		}
	}
	return "", errors.New("no cgroup v2 is mounted: mount one, socket-level Services need it")
}

// BPFFS is the first node's --bpffs, on the lab's own BPF file system.
func (l *Lab) BPFFS() string { return l.Node().BPFFS() }

// StateDir is the first node's --state-dir.
func (l *Lab) StateDir() string { return l.Node().StateDir() }

// BPFFS is the node's own --bpffs.
func (n *Node) BPFFS() string { return filepath.Join(n.lab.info.bpf(), n.Name) }

// StateDir is the node's own --state-dir.
func (n *Node) StateDir() string { return filepath.Join(n.lab.info.state(), n.Name) }

// makeDirs makes the lab's own BPF file system, since what is pinned there lives
// exactly as long as the lab, and its state directory, in memory as a system's
// /run is.
func (l *Lab) makeDirs() error {
	for path, kind := range map[string]string{l.info.bpf(): "bpf", l.info.state(): "tmpfs"} {
		if err := os.Mkdir(path, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(kind, path, kind, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
			return fmt.Errorf("mount %s at %s: %w", kind, path, err)
		}
		if err := unix.Mount("", path, "", unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make %s private: %w", path, err)
		}
	}
	return nil
}

// Name is the lab's.
func (l *Lab) Name() string { return l.cfg.Name }

// Node is the lab's first node.
func (l *Lab) Node() *Node { return l.nodes[0] }

// Nodes are all of them.
func (l *Lab) Nodes() []*Node { return append([]*Node(nil), l.nodes...) }

// Outside is the machine beyond the node's uplink.
func (l *Lab) Outside() *Outside { return l.outside }

// Close removes every trace of the lab, its processes first. Closing again is
// success.
func (l *Lab) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	if err := locked(l.info.remove); err != nil {
		return fmt.Errorf("remove lab %s: %w", l.cfg.Name, err)
	}
	l.closed = true
	return nil
}

// MustangArgs is Node.MustangArgs of the first node.
func (l *Lab) MustangArgs(args ...string) []string { return l.Node().MustangArgs(args...) }

// Mustang is Node.Mustang of the first node.
func (l *Lab) Mustang(ctx context.Context, args ...string) ([]byte, error) {
	return l.Node().Mustang(ctx, args...)
}

// MustangArgs is the command line of the binary under test with the node's
// scope: what Mustang runs, for those who run it themselves.
func (n *Node) MustangArgs(args ...string) []string {
	argv := []string{n.lab.cfg.Binary, "--bpffs", n.BPFFS(), "--state-dir", n.StateDir()}
	if n.Cgroup != "" {
		argv = append(argv, "--cgroup-root", n.Cgroup)
	}
	return append(argv, args...)
}

// Mustang runs the binary in the node's namespace and returns what it prints.
func (n *Node) Mustang(ctx context.Context, args ...string) ([]byte, error) {
	return runQuiet(n.Command(ctx, n.MustangArgs(args...)...), "mustang "+strings.Join(args, " "))
}

// runQuiet returns standard output; standard error goes into the error.
func runQuiet(c *Cmd, what string) ([]byte, error) {
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return out, fmt.Errorf("%s: %w: %s", what, err, lastLines(stderr.String()))
	}
	return out, nil
}

// lastLines keeps an error readable when a tool quotes its whole input.
func lastLines(s string) string {
	const limit = 2000
	s = strings.TrimSpace(s)
	if len(s) > limit {
		s = "… " + s[len(s)-limit:]
	}
	return s
}

var podNameOK = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

// AddPod makes a pod by `mustang pod add`, with these flags besides its own. A
// mode that the kernel lacks is an errors.ErrUnsupported.
func (n *Node) AddPod(ctx context.Context, name string, flags ...string) (*Pod, error) {
	l := n.lab
	if !podNameOK.MatchString(name) || l.reserved(name) {
		return nil, fmt.Errorf("pod name %q is not usable: use lower-case letters, digits and '-', and neither out nor switch nor a node's name", name)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.nextPod >= MaxPods(l.cfg.Nodes) {
		return nil, fmt.Errorf("add pod %s: node %s has addresses for %d pods", name, n.Name, n.nextPod)
	}
	ns, err := createNetNS("mst-" + l.cfg.Name + "-" + name)
	if err != nil {
		return nil, fmt.Errorf("add pod %s: %w", name, err)
	}
	n.nextPod++
	p := &Pod{Space: Space{ns, n.Cgroup, n.env}, Name: name, IPv4: nth(n.PodNet4, n.nextPod+1), IPv6: nth(n.PodNet6, n.nextPod+1)}
	if l.cfg.Mode == HostDevice {
		p.nic = fmt.Sprintf("nic%d", n.nextPod)
		if err := l.plugNIC(p.nic); err != nil {
			return nil, errors.Join(err, deleteNetNS(ns))
		}
	}
	if _, err := n.Mustang(ctx, append(n.PodArgs(p), flags...)...); err != nil {
		return nil, errors.Join(unsupported(err), l.pullNIC(p.nic), deleteNetNS(ns))
	}
	if p.nic != "" {
		if err := l.outside.Do(func() error { return settleLink(p.nic) }); err != nil {
			return nil, errors.Join(err, l.pullNIC(p.nic), deleteNetNS(ns))
		}
	}
	n.pods = append(n.pods, p)
	return p, nil
}

// reserved says whether a namespace of the lab's own has this name.
func (l *Lab) reserved(name string) bool {
	for _, n := range l.nodes {
		if n.Name == name {
			return true
		}
	}
	return name == outsideName || name == switchName
}

// unsupported marks the tool's refusal of a mode that the kernel lacks as
// errors.ErrUnsupported.
func unsupported(err error) error {
	if strings.Contains(err.Error(), ": this kernel has no ") {
		return fmt.Errorf("%w (%w)", err, errors.ErrUnsupported)
	}
	return err
}

// PodArgs is the command that makes p's interface.
func (n *Node) PodArgs(p *Pod) []string {
	l := n.lab
	ip4 := netip.PrefixFrom(p.IPv4, n.PodNet4.Bits())
	ip6 := netip.PrefixFrom(p.IPv6, n.PodNet6.Bits())
	args := []string{"pod", "add", p.Name, "--mode=" + string(l.cfg.Mode), "--netns=" + p.NetNS,
		"--ip=" + ip4.String() + "," + ip6.String(), fmt.Sprintf("--mtu=%d", l.cfg.MTU)}
	switch {
	case l.cfg.Mode.siblings():
		args = append(args, "--uplink="+Uplink)
	case l.cfg.Mode == HostDevice:
		args = append(args, "--uplink="+p.nic)
	}
	args = append(args, l.cfg.sizeArgs(n.PodNet4, n.PodNet6)...)
	if path := l.cfg.Services.servicePath(); path != "" {
		return append(args, "--service-path="+path)
	}
	return append(args, "--plain")
}

// RemovePod takes a pod away by `mustang pod rm`, and its namespace.
func (n *Node) RemovePod(ctx context.Context, p *Pod) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, err := n.Mustang(ctx, "pod", "rm", p.Name); err != nil {
		return err
	}
	for i, q := range n.pods {
		if q == p {
			n.pods = append(n.pods[:i:i], n.pods[i+1:]...)
			break
		}
	}
	return errors.Join(n.lab.pullNIC(p.nic), deleteNetNS(p.NetNS))
}

// Pods returns the node's pods in the order they were added.
func (n *Node) Pods() []*Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]*Pod(nil), n.pods...)
}
