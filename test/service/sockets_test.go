// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// serve is the server's main: TCP, UDP and SCTP on one port, both families. The first
// line of a connection asks for something: "who" tells the server's name and the
// client as it sees it, "echo" sends back whatever follows.
func serve() {
	name := os.Getenv("NAME")
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", serverPort))
	exitOn(err)
	u, err := net.ListenPacket("udp", fmt.Sprintf(":%d", serverPort))
	exitOn(err)
	go serveUDP(u, name)
	exitOn(serveSCTP(name))
	exitOn(os.WriteFile(os.Getenv("READY"), nil, 0o600))
	for {
		c, err := l.Accept()
		exitOn(err)
		go serveTCP(c, name)
	}
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "server:", err)
		os.Exit(1)
	}
}

func serveTCP(c net.Conn, name string) {
	defer c.Close()
	r := bufio.NewReader(c)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		switch strings.TrimSpace(line) {
		case "who":
			fmt.Fprintf(c, "%s %s\n", name, plain(c.RemoteAddr()))
		case "bye": // the server closes first, and keeps the TIME_WAIT
			return
		case "echo":
			io.Copy(c, r)
			return
		}
	}
}

func serveUDP(u net.PacketConn, name string) {
	buf := make([]byte, 65536)
	for {
		n, from, err := u.ReadFrom(buf)
		if err != nil {
			return
		}
		if n > 100 { // a large one comes back as it is
			u.WriteTo(buf[:n], from)
			continue
		}
		fmt.Fprintf(to{u, from}, "%s %s", name, plain(from))
	}
}

type to struct {
	net.PacketConn
	addr net.Addr
}

func (t to) Write(b []byte) (int, error) { return t.WriteTo(b, t.addr) }

// plain is an address without the ::ffff: of a dual-stack socket.
func plain(a net.Addr) netip.AddrPort {
	ap := netip.MustParseAddrPort(a.String())
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

func reuse(_, _ string, c syscall.RawConn) error {
	var err error
	c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
	return err
}

// dial connects from a pod; port 0 takes any source port.
func dial(p *lab.Pod, network string, dst netip.AddrPort, port uint16) (net.Conn, error) {
	var c net.Conn
	err := p.Do(func() (err error) {
		d := net.Dialer{Timeout: patience}
		if port != 0 {
			any := netip.IPv4Unspecified()
			if dst.Addr().Is6() {
				any = netip.IPv6Unspecified()
			}
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(any, port))
			d.Control = reuse
		}
		c, err = d.Dial(network, dst.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	c.SetDeadline(deadline())
	return c, nil
}

// deadline is that of whatever is done with a connection.
func deadline() time.Time { return time.Now().Add(2 * patience) }

// who asks the server on a connection for its name and the client it sees.
func who(c net.Conn) (name string, client netip.AddrPort, err error) {
	if _, err = io.WriteString(c, "who\n"); err != nil {
		return
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return
	}
	return parseWho(line)
}

func parseWho(line string) (name string, client netip.AddrPort, err error) {
	name, addr, ok := strings.Cut(strings.TrimSpace(line), " ")
	if !ok {
		return "", client, fmt.Errorf("the server said %q", line)
	}
	client, err = netip.ParseAddrPort(addr)
	return name, client, err
}
