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

// Lab is one node, its pods, and an outside that the node has a wire to.
type Lab struct {
	cfg     Config
	info    Info
	node    *Node
	outside *Outside

	mu     sync.Mutex
	closed bool
}

// Node is the lab's node, with its uplink Uplink.
type Node struct {
	Space
	Name       string
	IPv4, IPv6 netip.Addr // of the uplink

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
	if err := c.validate(); err != nil {
		return c, err
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

// BPFFS is the lab's own BPF file system.
func (l *Lab) BPFFS() string { return filepath.Join(l.info.dir(), "bpf") }

// StateDir is the lab's own --state-dir.
func (l *Lab) StateDir() string { return filepath.Join(l.info.dir(), "state") }

// makeDirs makes the lab's own state directory and BPF file system: what is
// pinned there lives exactly as long as the lab.
func (l *Lab) makeDirs() error {
	for _, d := range []string{l.BPFFS(), l.StateDir()} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("bpf", l.BPFFS(), "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpffs at %s: %w", l.BPFFS(), err)
	}
	if err := unix.Mount("", l.BPFFS(), "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make %s private: %w", l.BPFFS(), err)
	}
	return nil
}

// Name is the lab's.
func (l *Lab) Name() string { return l.cfg.Name }

// Node is the lab's node.
func (l *Lab) Node() *Node { return l.node }

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

// MustangArgs is the command line of the binary under test with the lab's
// scope: what Mustang runs, for those who run it themselves.
func (l *Lab) MustangArgs(args ...string) []string {
	argv := []string{l.cfg.Binary, "--bpffs", l.BPFFS(), "--state-dir", l.StateDir()}
	if l.cfg.CgroupRoot != "" {
		argv = append(argv, "--cgroup-root", l.cfg.CgroupRoot)
	}
	return append(argv, args...)
}

// Mustang runs the binary in the node's namespace and returns what it prints.
func (l *Lab) Mustang(ctx context.Context, args ...string) ([]byte, error) {
	return runQuiet(l.node.Command(ctx, l.MustangArgs(args...)...), "mustang "+strings.Join(args, " "))
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
	if !podNameOK.MatchString(name) || name == "n1" || name == "out" {
		return nil, fmt.Errorf("pod name %q is not usable: use lower-case letters, digits and '-', and neither n1 nor out", name)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.lab
	ns, err := createNetNS("mst-" + l.cfg.Name + "-" + name)
	if err != nil {
		return nil, fmt.Errorf("add pod %s: %w", name, err)
	}
	n.nextPod++
	p := &Pod{Space: Space{ns, n.env}, Name: name, IPv4: nth(PodCIDR4, n.nextPod+1), IPv6: nth(PodCIDR6, n.nextPod+1)}
	if l.cfg.Mode == HostDevice {
		p.nic = fmt.Sprintf("nic%d", n.nextPod)
		if err := l.plugNIC(p.nic); err != nil {
			return nil, errors.Join(err, deleteNetNS(ns))
		}
	}
	if _, err := l.Mustang(ctx, append(l.PodArgs(p), flags...)...); err != nil {
		return nil, errors.Join(unsupported(err), l.pullNIC(p.nic), deleteNetNS(ns))
	}
	n.pods = append(n.pods, p)
	return p, nil
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
func (l *Lab) PodArgs(p *Pod) []string {
	ip4 := netip.PrefixFrom(p.IPv4, PodCIDR4.Bits())
	ip6 := netip.PrefixFrom(p.IPv6, PodCIDR6.Bits())
	args := []string{"pod", "add", p.Name, "--mode=" + string(l.cfg.Mode), "--netns=" + p.NetNS,
		"--ip=" + ip4.String() + "," + ip6.String(), fmt.Sprintf("--mtu=%d", l.cfg.MTU)}
	switch {
	case l.cfg.Mode.siblings():
		args = append(args, "--uplink="+Uplink)
	case l.cfg.Mode == HostDevice:
		args = append(args, "--uplink="+p.nic)
	}
	args = append(args, l.cfg.sizeArgs()...)
	if path := l.cfg.Services.servicePath(); path != "" {
		return append(args, "--service-path="+path)
	}
	return append(args, "--plain")
}

// RemovePod takes a pod away by `mustang pod rm`, and its namespace.
func (n *Node) RemovePod(ctx context.Context, p *Pod) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, err := n.lab.Mustang(ctx, "pod", "rm", p.Name); err != nil {
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
