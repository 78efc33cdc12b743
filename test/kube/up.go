// SPDX-License-Identifier: Apache-2.0

// This file starts a cluster.

package kube

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

//go:embed manifests/coredns.yaml
var corednsManifest string

// startTimeout bounds Up. An idle machine needs a fifteenth of it.
const startTimeout = 5 * time.Minute

// Up starts a cluster and returns when its nodes are Ready and its DNS works;
// without a CNI, when its nodes are registered. What a killed Up of the same
// name left is removed first; on an error, nothing stays but the logs'
// last lines in the error.
func Up(ctx context.Context, config Config, out io.Writer) (err error) {
	config, err = config.withDefaults()
	if err != nil {
		return err
	}
	if missing, err := Missing(); err != nil {
		return err
	} else if len(missing) > 0 {
		return notBuilt(missing, "")
	}
	c := open(config.Name)
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if err := c.sweep(); err != nil {
		return err
	}
	c.record = record{Config: config}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not done after %v", startTimeout))
	defer cancel()
	if err := c.up(ctx, &progress{out: out, start: time.Now()}); err != nil {
		err = fmt.Errorf("start cluster %q: %w%s", config.Name, err, c.autopsy())
		return errors.Join(err, c.remove())
	}
	return nil
}

func notBuilt(missing []string, flag string) error {
	return fmt.Errorf("not built yet: %s; to build: test/kube/kube build%s", strings.Join(missing, ", "), flag)
}

// sweep removes what a killed Up left. A cluster that runs is not ours to end.
func (c *cluster) sweep() error {
	err := c.load()
	if errors.Is(err, fs.ErrNotExist) {
		return os.RemoveAll(c.dir) // killed before anything but the directory was made
	}
	if err != nil {
		return err
	}
	if c.Ready && c.pid(ControlPlane) != 0 {
		return fmt.Errorf("cluster %q runs already; to end it: kube down --name %s", c.Config.Name, c.Config.Name)
	}
	return c.remove()
}

type progress struct {
	out   io.Writer
	start time.Time
}

func (p *progress) say(format string, args ...any) {
	fmt.Fprintf(p.out, "%6.1f s  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

func (c *cluster) up(ctx context.Context, p *progress) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()
	c.Port = listener.Addr().(*net.TCPAddr).Port
	trees, err := c.planCgroups()
	if err != nil {
		return err
	}
	if err := c.save(); err != nil { // from here on, `down` knows what to remove
		return err
	}
	ca, admin, err := c.makePKI()
	if err != nil {
		return err
	}
	if err := errors.Join(c.makeCgroups(), c.makeNetwork()); err != nil {
		return err
	}
	socket, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer socket.Close()
	if err := c.startMachines(ctx, trees, socket); err != nil {
		return err
	}
	p.say("machines started")
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go c.watch(ctx, cancel)

	a, err := newAPI(c.Port, ca, admin)
	if err != nil {
		return err
	}
	if err := c.bootstrap(ctx, p, a); err != nil {
		return err
	}
	if c.Config.CNI != NoCNI {
		if err := c.ready(ctx); err != nil {
			return err
		}
		p.say("nodes and DNS are ready")
	}
	c.Ready = true
	return c.save()
}

// bootstrap waits for the API server and the nodes' pod CIDRs, and connects
// the nodes' pods where that is our task.
func (c *cluster) bootstrap(ctx context.Context, p *progress, a *api) error {
	err := poll(ctx, "wait for the API server", 50*time.Millisecond, func(ctx context.Context) error {
		return a.get(ctx, "/readyz", nil)
	})
	if err != nil {
		return err
	}
	for _, machine := range c.Config.machines() {
		if err := writeFile(c.path(machine, "kubernetes", apiReady), "", 0o644); err != nil {
			return err
		}
	}
	p.say("API server ready")
	for _, node := range c.Config.nodes() {
		var cidrs []netip.Prefix
		err := poll(ctx, "wait for node "+node, 100*time.Millisecond, func(ctx context.Context) (err error) {
			cidrs, err = a.podCIDRs(ctx, node)
			return err
		})
		if err != nil {
			return err
		}
		if err := errors.Join(c.connect(node, cidrs), writeFile(c.path(node, "kubernetes", nodeKnown), "", 0o644)); err != nil {
			return err
		}
	}
	p.say("nodes registered")
	return nil
}

// connect makes a node's pods reachable: for the control plane always, since
// the API server calls webhooks and proxies to pods; for other nodes where no
// CNI under test does it.
func (c *cluster) connect(node string, cidrs []netip.Prefix) error {
	if err := c.routePods(ControlPlane, node, cidrs); err != nil {
		return err
	}
	if c.Config.CNI != BridgeCNI {
		return nil
	}
	for _, other := range c.Config.nodes() {
		if other == node {
			continue
		}
		if err := c.routePods(other, node, cidrs); err != nil {
			return err
		}
	}
	subnets := make([]string, len(cidrs))
	for i, cidr := range cidrs {
		subnets[i] = cidr.String()
	}
	return writeFile(c.path(node, "cni/net.d/10-bridge.conflist"), bridgeConfig(subnets), 0o644)
}

// ready waits for the nodes, installs the DNS and waits for it.
func (c *cluster) ready(ctx context.Context) error {
	remaining := "--timeout=" + startTimeout.String()
	if err := c.kubectl(ctx, corednsManifest, "apply", "-f", "-"); err != nil {
		return err
	}
	if err := c.kubectl(ctx, "", "wait", "--for=condition=Ready", "node", "--all", remaining); err != nil {
		return err
	}
	return c.kubectl(ctx, "", "-n", "kube-system", "rollout", "status", "deployment/coredns", remaining)
}

// Ready does what Up does once a CNI is there: for a cluster that was started
// without one and has been given one since.
func Ready(ctx context.Context, name string) error {
	c, err := running(name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not done after %v", startTimeout))
	defer cancel()
	return c.ready(ctx)
}

// lives is how often daemons may end while a cluster starts: an API server whose
// own time for its start was too short on a busy machine does better when it is
// started again.
const lives = 3

// watch cancels a start when daemons have died so often that it will not get
// better, as those of a machine that has died itself.
func (c *cluster) watch(ctx context.Context, cancel context.CancelCauseFunc) {
	for ctx.Err() == nil {
		dead := c.deaths()
		if len(dead) > lives || slices.ContainsFunc(dead, func(line string) bool { return strings.HasPrefix(line, "machine ") }) {
			cancel(errors.New("daemons ended"))
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (c *cluster) startMachines(ctx context.Context, trees []hierarchy, socket *os.File) error {
	b, err := newBuilder(ctx, 1, io.Discard)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.path("log"), 0o755); err != nil {
		return err
	}
	for _, machine := range c.Config.machines() {
		s, err := c.spec(b, machine, trees)
		if err != nil {
			return err
		}
		var listener *os.File
		if machine == ControlPlane {
			listener = socket
		}
		if err := c.start(s, listener); err != nil {
			return fmt.Errorf("start machine %s: %w", machine, err)
		}
	}
	return nil
}

// spec says what a machine is.
func (c *cluster) spec(b *builder, machine string, trees []hierarchy) (spec, error) {
	s := spec{
		Name: machine, NetNS: c.netnsPath(machine), Cgroups: c.cgroupsOf(machine),
		Env:     c.environment(b),
		Sysctls: map[string]string{"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1", "net/ipv4/conf/all/rp_filter": "0"},
		Root: rootSpec{
			Dir: c.path(machine, "root"), EtcUpper: c.path(machine, "etc"), EtcWork: c.path(machine, "etc.work"),
			Hierarchies: trees, CgroupLinks: cgroupLinks(),
			Files: map[string]string{
				"/etc/hostname": machine + "\n", "/etc/hosts": c.hosts(), "/etc/resolv.conf": "nameserver 192.0.2.53\n",
			},
		},
	}
	binds, err := c.binds(machine)
	if err != nil {
		return s, err
	}
	s.Root.Binds = binds
	if machine == ControlPlane {
		s.Steps = controlPlaneSteps(c.Config)
		s.Forward = net.JoinHostPort(controlPlane4.String(), "6443")
		return s, nil
	}
	s.Root.Masks = map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	}
	var archives []string
	for _, image := range images {
		archives = append(archives, b.path(image, image))
	}
	s.Steps = nodeSteps(c.Config, machine, archives)
	return s, c.nodeDirectories(machine)
}

// environment is what programs in a machine see.
func (c *cluster) environment(b *builder) []string {
	return []string{
		"PATH=" + b.dir("hyperkube") + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "LANG=C.UTF-8", "KUBECONFIG=" + etcFile("admin.conf"), "MUSTANG_KUBE_CACHE=" + filepath.Dir(b.store),
	}
}

func (c *cluster) hosts() string {
	hosts := "127.0.0.1 localhost\n::1 localhost\n"
	for _, machine := range c.Config.machines() {
		hosts += fmt.Sprintf("%s %s\n", address4(machine), machine)
	}
	return hosts
}

func (c *cluster) binds(machine string) ([]bind, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	cache, err := Cache()
	if err != nil {
		return nil, err
	}
	binds := []bind{
		{Source: root, Target: root}, {Source: cache, Target: cache},
		{Source: c.path("log"), Target: machineLogs},
		{Source: c.path(machine, "kubernetes"), Target: etcKubernetes},
	}
	if machine != ControlPlane {
		binds = append(binds,
			bind{Source: c.path(machine, "cni/bin"), Target: "/opt/cni/bin"},
			bind{Source: c.path(machine, "cni/net.d"), Target: "/etc/cni/net.d"})
	}
	for _, dir := range c.Config.Binds {
		binds = append(binds, bind{Source: dir, Target: dir})
	}
	return binds, nil
}

// nodeDirectories makes what is bound into a node. The reference plugins are
// links: a node has /usr.
func (c *cluster) nodeDirectories(node string) error {
	for name, content := range nodeFiles(c.Config, node) {
		if err := writeFile(c.path(node, "kubernetes", name), content, 0o644); err != nil {
			return err
		}
	}
	for _, dir := range []string{"cni/bin", "cni/net.d"} {
		if err := os.MkdirAll(c.path(node, dir), 0o755); err != nil {
			return err
		}
	}
	plugins, err := os.ReadDir(cniPlugins)
	if err != nil {
		return err
	}
	for _, plugin := range plugins {
		if err := symlink(filepath.Join(cniPlugins, plugin.Name()), c.path(node, "cni/bin", plugin.Name())); err != nil {
			return err
		}
	}
	return nil
}

// deaths lists machines and daemons that ended since the cluster was started.
func (c *cluster) deaths() []string {
	var dead []string
	b, _ := os.ReadFile(c.path("log", deaths))
	for line := range bytes.Lines(b) {
		dead = append(dead, string(bytes.TrimSpace(line)))
	}
	for _, machine := range c.Config.machines() {
		if _, err := os.Stat(c.path("pids", machine)); err == nil && c.pid(machine) == 0 {
			log, _ := os.ReadFile(c.logFile(machine + ".init"))
			dead = append(dead, fmt.Sprintf("machine %s ended: %s", machine, tail(bytes.TrimSpace(log), 500)))
		}
	}
	return dead
}

// autopsy collects the last lines of whatever died, before it is removed.
func (c *cluster) autopsy() string {
	var report string
	for _, line := range c.deaths() {
		report += "\n" + line
	}
	logs, _ := filepath.Glob(c.path("log", "*.log"))
	for _, log := range logs {
		name := filepath.Base(log)
		content, err := os.ReadFile(log)
		if err == nil && bytes.Contains([]byte(report), []byte(" "+name[:len(name)-len(".log")]+" ended")) {
			report += fmt.Sprintf("\n--- the end of %s:\n%s", name, tail(content, 1500))
		}
	}
	return report
}
