// SPDX-License-Identifier: Apache-2.0

package cni_test

// Servers in containers, and clients anywhere.

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"
)

// serve says hello to each TCP connection, each datagram, and each SCTP association
// where the kernel has such.
func serve(address string) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	u, err := net.ListenPacket("udp", address)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := serveSCTP(uint16(l.Addr().(*net.TCPAddr).Port)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	go func() {
		buf := make([]byte, 100)
		for {
			_, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			u.WriteTo(fmt.Appendln(nil, "hello", from), from)
		}
	}()
	fmt.Println("ready")
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		fmt.Fprintln(c, "hello", c.RemoteAddr())
		c.Close()
	}
}

// How long an answer is waited for that must come, and one that must not.
const (
	patience = time.Minute
	silence  = 2 * time.Second
)

// dial asks once, by TCP or, for an address that starts with "udp " or "sctp ", by these.
func dial(address string, wait time.Duration) int {
	network := "tcp"
	if rest, udp := strings.CutPrefix(address, "udp "); udp {
		network, address = "udp", rest
	}
	var c net.Conn
	var err error
	if rest, sctp := strings.CutPrefix(address, "sctp "); sctp {
		c, err = dialSCTP(rest, wait)
	} else {
		c, err = net.DialTimeout(network, address, wait)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(wait))
	if network == "udp" {
		if _, err := c.Write([]byte("hello?")); err != nil {
			fmt.Println(err)
			return 1
		}
	}
	line := make([]byte, 100)
	got, err := c.Read(line)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Print(string(line[:got]))
	return 0
}

// server starts serve in a container and returns when it listens.
func (c *container) server(address string) {
	c.t.Helper()
	cmd := exec.Command("nsenter", "--net="+c.path(), os.Args[0])
	cmd.Env = append(os.Environ(), roleVariable+"=server", "LISTEN="+address)
	out, err := cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if _, err := out.Read(make([]byte, 6)); err != nil {
		c.t.Fatalf("the server in %s: %v", c.id, err)
	}
}

// reaches dials from a namespace, and answers whom the server saw.
func (n *node) reaches(ns, address string) string {
	n.t.Helper()
	out, err := n.dials(ns, address, patience)
	if err != nil {
		n.t.Errorf("from %s to %s: %v: %s", ns, address, err, out)
	}
	return out
}

func (n *node) dials(ns, address string, wait time.Duration) (string, error) {
	cmd := exec.Command("nsenter", "--net=/var/run/netns/"+ns, os.Args[0])
	cmd.Env = append(os.Environ(), roleVariable+"=client", "DIAL="+address, "WAIT="+slow(wait).String())
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// pings says whether one namespace reaches an address. It asks until one answer
// is there: on a busy machine neither a neighbour's nor the answer is there
// within a second, which is also when the kernel asks a neighbour again.
func (n *node) pings(ns, address string) bool {
	n.t.Helper()
	inside := "--net=/var/run/netns/" + ns
	out, err := exec.Command("nsenter", inside, "ping", "-c1", fmt.Sprintf("-w%.0f", slow(patience).Seconds()), "-i0.3", "-q", address).CombinedOutput()
	if err == nil {
		return true
	}
	n.t.Logf("ping %s from %s: %v: %s", address, ns, err, out)
	for _, args := range []string{"ip neigh", "ip -6 route", "ip -s link", "nstat -as"} {
		state, _ := exec.Command("nsenter", append([]string{inside}, strings.Fields(args)...)...).CombinedOutput()
		n.t.Logf("%s there:\n%s", args, state)
	}
	return false
}
