// SPDX-License-Identifier: Apache-2.0

package cni_test

// Addresses from the pod's own network: Debian's dhcp plugin with its daemon,
// against a DHCP server.

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// lines are what a process that a test started has said so far.
type lines struct {
	mu   sync.Mutex
	list []string
	pid  int
}

// count says how many lines have part.
func (l *lines) count(part string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.list {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}

// daemon runs a program in a namespace until the test ends.
func (n *node) daemon(ns string, args ...string) *lines {
	n.t.Helper()
	cmd := exec.Command("nsenter", append([]string{"--net=/var/run/netns/" + ns}, args...)...)
	r, w, err := os.Pipe()
	if err != nil {
		n.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	w.Close()
	l := &lines{pid: cmd.Process.Pid}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for s := bufio.NewScanner(r); s.Scan(); {
			l.mu.Lock()
			l.list = append(l.list, s.Text())
			l.mu.Unlock()
		}
	}()
	n.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		<-read
		r.Close()
		if n.t.Failed() {
			n.t.Logf("%s said:\n%s", args[0], strings.Join(l.list, "\n"))
		}
	})
	return l
}

// leaseNet is a network that gives out addresses: the server's namespace, its
// interface and address there.
type leaseNet struct{ ns, dev, server, first, last string }

// leaseNet prepares the network of a mode on n.
func (n *node) leaseNet(mode string) leaseNet {
	switch mode {
	case "bridge": // the node serves its own bridge
		run(n.t, "ip", "-n", n.name, "link", "add", "mst-br0", "type", "bridge")
		run(n.t, "ip", "-n", n.name, "addr", "add", "10.66.0.1/24", "dev", "mst-br0")
		run(n.t, "ip", "-n", n.name, "link", "set", "mst-br0", "up")
		return leaseNet{n.name, "mst-br0", "10.66.0.1", "10.66.0.100", "10.66.0.110"}
	case "host-device":
		n.device(mode)
		run(n.t, "ip", "-n", n.outside(), "addr", "add", "10.66.0.1/24", "dev", "dev0")
		return leaseNet{n.outside(), "dev0", "10.66.0.1", "10.66.0.100", "10.66.0.110"}
	}
	return leaseNet{n.outside(), uplink, "192.168.7.2", "192.168.7.100", "192.168.7.110"}
}

// serveLeases runs a DHCP server; router is what it names as one, "" nothing.
func (n *node) serveLeases(l leaseNet, seconds int, router string) *lines {
	n.t.Helper()
	leases := filepath.Join(n.dir, "leases")
	config := fmt.Sprintf("start %s\nend %s\nmax_leases 10\ninterface %s\nlease_file %s\npidfile %s.pid\noption subnet 255.255.255.0\noption lease %d\nmin_lease 2\n",
		l.first, l.last, l.dev, leases, leases, seconds)
	if router != "" {
		config += "option router " + router + "\n"
	}
	for file, text := range map[string]string{leases: "", leases + ".conf": config} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			n.t.Fatal(err)
		}
	}
	server := n.daemon(l.ns, "busybox", "udhcpd", "-f", "-a", "10", leases+".conf")
	n.eventually("the DHCP server's start", func() bool { return server.count("started") > 0 })
	return server
}

// leaseDaemon runs the dhcp plugin's daemon, which waits so long for each of several answers,
// and answers the ipam object that leads to it.
func (n *node) leaseDaemon(wait string) (daemon *lines, ipam map[string]any) {
	n.t.Helper()
	socket := filepath.Join(n.dir, "dhcp.sock")
	daemon = n.daemon(n.name, filepath.Join(debianCNI, "dhcp"), "daemon", "-socketpath", socket, "-timeout", wait, "-resendmax", wait)
	n.eventually("the dhcp daemon's socket", func() bool { _, err := os.Stat(socket); return err == nil })
	return daemon, map[string]any{"type": "dhcp", "daemonSocketPath": socket}
}

func (n *node) eventually(what string, is func() bool) {
	n.t.Helper()
	for end := time.Now().Add(slow(patience)); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			n.t.Fatalf("not within %s: %s", slow(patience), what)
		}
	}
}

func TestDHCP_LeasesRenewsAndGivesBack(t *testing.T) {
	for _, mode := range []string{"macvlan", "bridge", "host-device"} {
		t.Run(mode, func(t *testing.T) {
			n := newNode(t)
			net := n.leaseNet(mode)
			server := n.serveLeases(net, 12, net.server)
			daemon, ipam := n.leaseDaemon("5s")
			conf := n.config(mode).with("ipam", ipam)
			n.ok(n.exec(n.command(binary, "STATUS", conf)))
			warm := n.container()
			warm.add(conf)
			warm.del(conf)
			c := n.container()
			before, open := n.traces(), fds(daemon.pid)
			releases := daemon.count("releasing lease")
			a := c.add(conf)
			if len(a.IPs) != 1 || a.IPs[0].Gateway != net.server || !strings.HasSuffix(a.IPs[0].Address, "/24") || len(a.Routes) != 1 || a.Routes[0].Dst != "0.0.0.0/0" {
				t.Fatalf("got %s", a.stdout)
			}
			if addr := a.address(0); len(addr) != len(net.first) || addr < net.first || addr > net.last {
				t.Errorf("%s is not the server's to give", addr)
			}
			if !n.pings(c.ns, net.server) || !n.pings(net.ns, a.address(0)) {
				t.Error("the pod and its network do not reach each other")
			}
			acks := server.count("sending ACK")
			n.eventually("a renewed lease", func() bool { return server.count("sending ACK") > acks })
			c.del(conf)
			n.eventually("the lease is given back", func() bool { return daemon.count("releasing lease") > releases })
			n.same(before, n.traces())
			n.eventually("the daemon's descriptors go back to what they were", func() bool { return fds(daemon.pid) <= open })
			// Debian's daemon takes one more lease for CHECK, and keeps it until it ends.
			b := c.add(conf)
			c.ok(c.call("CHECK", conf.prev(b)))
			c.del(conf)
			n.same(before, n.traces())
		})
	}
}

// The pod stays closed while its network is asked: it may send broadcasts, and
// nobody reaches it.
func TestDHCP_WithoutAnAnswerADDFailsAndLeavesNothing(t *testing.T) {
	n := newNode(t)
	_, ipam := n.leaseDaemon("2s")
	conf := n.config("macvlan").with("ipam", ipam)
	own := n.container()
	own.add(n.config("macvlan"))
	own.del(n.config("macvlan"))
	c := n.container()
	n.unchanged(func() {
		adding := make(chan answer, 1)
		go func() { adding <- c.call("ADD", conf) }()
		n.eventually("the interface is up", func() bool {
			out, _ := exec.Command("ip", "-n", c.ns, "link", "show", "eth0").CombinedOutput()
			return strings.Contains(string(out), ",UP")
		})
		endpoints, _ := filepath.Glob(filepath.Join(n.state(), "endpoints", "*.json"))
		if out := run(t, "ip", "-n", c.ns, "addr", "show", "eth0"); len(endpoints) != 1 || strings.Contains(out, "inet") {
			t.Errorf("%d endpoints while the network is asked, and the interface has:\n%s", len(endpoints), out)
		}
		if a := <-adding; a.status == 0 {
			t.Errorf("got %s", a.stdout)
		}
		c.del(conf)
	})
}

func TestDHCP_STATUSSaysThatTheDaemonIsMissing(t *testing.T) {
	n := newNode(t)
	conf := n.config("macvlan").with("ipam", map[string]any{"type": "dhcp", "daemonSocketPath": filepath.Join(n.dir, "none.sock")})
	n.refused(n.exec(n.command(binary, "STATUS", conf)), 50, "daemon")
	warm := n.container()
	warm.add(n.config("macvlan"))
	warm.del(n.config("macvlan"))
	c := n.container()
	n.unchanged(func() {
		if a := c.call("ADD", conf); a.status == 0 || !strings.Contains(a.Msg, "daemon") {
			t.Errorf("got %s", a.stdout)
		}
	})
}

// Without a router there is no default route, and nobody else's address is one.
func TestDHCP_NoRouterNoDefaultRoute(t *testing.T) {
	n := newNode(t)
	n.serveLeases(n.leaseNet("macvlan"), 60, "")
	_, ipam := n.leaseDaemon("5s")
	conf := n.config("macvlan").with("ipam", ipam)
	c := n.container()
	a := c.add(conf)
	if len(a.Routes) != 0 || a.IPs[0].Gateway != "" {
		t.Errorf("got %s", a.stdout)
	}
	if out := run(t, "ip", "-n", c.ns, "route"); strings.Contains(out, "default") {
		t.Errorf("routes:\n%s", out)
	}
	c.ok(c.call("CHECK", conf.prev(a)))
	c.del(conf)
}
