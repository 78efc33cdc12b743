// SPDX-License-Identifier: Apache-2.0

package lab

// What the tests share: the mustang binary, servers in pods, what exists on
// the machine.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/mustang-net/mustang/test/built"
)

const (
	serverPort = 8080
	deadline   = time.Minute    // of what hangs
	holdEnv    = "LABTEST_HOLD" // makes this binary build a lab and wait to be killed
)

var binary string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if name := os.Getenv(holdEnv); name != "" {
			return hold(name)
		}
		if os.Getuid() != 0 {
			fmt.Println("skipped: needs root")
			return 0
		}
		dir, err := os.MkdirTemp("", "labtest-")
		if err != nil {
			fmt.Println(err)
			return 1
		}
		defer os.RemoveAll(dir)
		if binary, err = built.Binary(dir, "mustang", "MUSTANG_BIN"); err != nil {
			fmt.Println(err)
			return 1
		}
		code := m.Run()
		if err := goleak.Find(); code == 0 && err != nil {
			fmt.Println(err)
			return 1
		}
		return code
	}())
}

func TestWhatIsRunIsAnInput(t *testing.T) { built.Declare(t, "mustang") }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// build makes a lab with n pods, each serving its name, and checks at the end
// that the machine is as before.
func build(t *testing.T, cfg Config, n int) *Lab {
	t.Helper()
	before := machine(t, cfg.Name)
	cfg.Binary = binary
	l, err := New(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if d := cmp.Diff(before, machine(t, cfg.Name)); d != "" {
			t.Errorf("the lab left something behind:\n%s", d)
		}
	})
	for i := range n {
		p, err := l.Node().AddPod(testContext(t), fmt.Sprintf("p%d", i+1))
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		serve(t, p)
	}
	return l
}

// name makes a lab's name of a letter and this process's id: the same tests may
// run twice on one machine at the same time.
func name(letter string) string { return letter + strconv.FormatInt(int64(os.Getpid()), 36) }

// machine lists what a lab of this name could leave behind. Others use the
// machine too, so what is not a lab's by its name does not count.
func machine(t *testing.T, lab string) []string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	out := []string{}
	for _, line := range strings.Split(string(mounts), "\n") {
		if f := strings.Fields(line); len(f) > 1 && (strings.Contains(f[1], "mst-"+lab+"-") || strings.HasPrefix(f[1], rootDir+"/"+lab)) {
			out = append(out, "mount "+f[1])
		}
	}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		pods := len(l.Name) == 15 && strings.HasPrefix(l.Name, "mst")
		if pods || l.Name == "mst-br0" || strings.HasPrefix(l.Name, "mv-") {
			out = append(out, "link "+l.Name)
		}
	}
	for _, pattern := range []string{netnsDir + "/mst-" + lab + "-*", rootDir + "/" + lab} {
		files, _ := filepath.Glob(pattern)
		out = append(out, files...)
	}
	slices.Sort(out)
	return out
}

// serve answers each TCP connection and each datagram with the pod's name.
func serve(t *testing.T, p *Pod) {
	t.Helper()
	var ln net.Listener
	var pcs []net.PacketConn
	err := p.Do(func() (err error) {
		if ln, err = net.Listen("tcp", fmt.Sprintf(":%d", serverPort)); err != nil {
			return err
		}
		// A wildcard socket would answer from any address: one for each.
		for _, ip := range []netip.Addr{p.IPv4, p.IPv6} {
			pc, err := net.ListenPacket("udp", netip.AddrPortFrom(ip, serverPort).String())
			if err != nil {
				return err
			}
			pcs = append(pcs, pc)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{}, 3)
	go func() {
		defer func() { done <- struct{}{} }()
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, p.Name)
			c.Close()
		}
	}()
	for _, pc := range pcs {
		go func() {
			defer func() { done <- struct{}{} }()
			buf := make([]byte, 64)
			for {
				_, from, err := pc.ReadFrom(buf)
				if err != nil {
					return
				}
				pc.WriteTo([]byte(p.Name), from)
			}
		}()
	}
	t.Cleanup(func() {
		ln.Close()
		for _, pc := range pcs {
			pc.Close()
		}
		for range 3 {
			<-done
		}
	})
}

// ask connects from a namespace and returns who answered, and how long the
// first round trip took.
func ask(from *Space, network string, to netip.AddrPort, wait time.Duration) (who string, took time.Duration, err error) {
	err = from.Do(func() error {
		start := time.Now()
		c, err := (&net.Dialer{Timeout: wait}).Dial(network, to.String())
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(start.Add(wait))
		if network == "udp" {
			if _, err := c.Write([]byte("?")); err != nil {
				return err
			}
		}
		buf := make([]byte, 64)
		n, err := c.Read(buf)
		who, took = string(buf[:n]), time.Since(start)
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return err
	})
	return who, took, err
}

// askAll asks until each of the names has answered.
func askAll(t *testing.T, what string, from *Space, network string, to netip.AddrPort, names ...string) {
	t.Helper()
	missing := slices.Clone(names)
	end := time.Now().Add(deadline)
	for len(missing) > 0 {
		who, _, err := ask(from, network, to, deadline)
		if err != nil {
			t.Errorf("%s by %s to %s: %v", what, network, to, err)
			return
		}
		if !slices.Contains(names, who) {
			t.Errorf("%s by %s to %s: %q answered, want one of %v", what, network, to, who, names)
			return
		}
		missing = slices.DeleteFunc(missing, func(s string) bool { return s == who })
		if time.Now().After(end) {
			t.Errorf("%s by %s to %s: %v never answered", what, network, to, missing)
			return
		}
	}
}
