// SPDX-License-Identifier: Apache-2.0

// Package peer is both ends of a connectivity test, inside pods: a server that
// says who it is and whom it sees, and a client that asks it.
package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Port is where the server listens, for TCP and UDP.
const Port = 8080

// Answer is what a server says of itself and of who asked.
type Answer struct {
	Server string `json:"server"` // its pod
	Client string `json:"client"` // the address that it sees
	// Path is the MTU that the client's kernel knows on the way, for mtu.
	Path int `json:"path,omitempty"`
}

// Serve answers until ctx ends.
func Serve(ctx context.Context, port int) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	address := ":" + strconv.Itoa(port)
	packets, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	stream, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler(name), ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { server.Close(); packets.Close() })()
	go echo(packets, name)
	if err := server.Serve(stream); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func seen(addr string) string {
	a, err := netip.ParseAddrPort(addr)
	if err != nil {
		return addr
	}
	return a.Addr().Unmap().String()
}

// handler reads whatever is sent, and answers who it is, then as many bytes as
// it is asked for.
func handler(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return
		}
		n, _ := strconv.Atoi(r.FormValue("bytes"))
		_ = json.NewEncoder(w).Encode(Answer{Server: name, Client: seen(r.RemoteAddr)})
		_, _ = io.CopyN(w, zeros{}, int64(n))
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// echo answers each datagram by one as long, which begins with an answer.
func echo(conn net.PacketConn, name string) {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		text, _ := json.Marshal(Answer{Server: name, Client: seen(from.String())})
		out := make([]byte, max(n, len(text)))
		copy(out, text)
		_, _ = conn.WriteTo(out, from)
	}
}

// bulk is how much goes each way in the test of long packets.
const bulk = 2 << 20

// Ask asks once. How: "tcp", "udp", "bulk" (TCP, 2 MiB each way), "mtu" (the
// longest datagram that the way takes in one piece), "connect" (TCP, and no
// word), "dns".
func Ask(ctx context.Context, how, target string) (Answer, error) {
	var d net.Dialer
	switch how {
	case "tcp":
		return askHTTP(ctx, target, 0)
	case "bulk":
		return askHTTP(ctx, target, bulk)
	case "udp", "mtu":
		conn, err := d.DialContext(ctx, "udp", target)
		if err != nil {
			return Answer{}, err
		}
		defer conn.Close()
		return askUDP(ctx, conn.(*net.UDPConn), how == "mtu")
	case "connect":
		conn, err := d.DialContext(ctx, "tcp", target)
		if err != nil {
			return Answer{}, err
		}
		return Answer{Client: seen(conn.LocalAddr().String())}, conn.Close()
	case "dns":
		list, err := net.DefaultResolver.LookupHost(ctx, target)
		return Answer{Server: strings.Join(list, ",")}, err
	}
	return Answer{}, fmt.Errorf("%q is none of tcp, udp, bulk, mtu, connect, dns", how)
}

func askHTTP(ctx context.Context, target string, bytes int) (a Answer, err error) {
	body := io.LimitReader(zeros{}, int64(bytes))
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://%s/?bytes=%d", target, bytes), body)
	if err != nil {
		return a, err
	}
	answer, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
	if err != nil {
		return a, err
	}
	defer answer.Body.Close()
	lines := json.NewDecoder(answer.Body)
	if err := lines.Decode(&a); err != nil {
		return a, err
	}
	n, err := io.Copy(io.Discard, io.MultiReader(lines.Buffered(), answer.Body))
	if err == nil && n < int64(bytes) {
		err = fmt.Errorf("%d of %d bytes came", n, bytes)
	}
	return a, err
}

// askUDP sends one datagram and waits for its answer; full: of the length that
// the kernel says the way takes, not to be fragmented.
func askUDP(ctx context.Context, conn *net.UDPConn, full bool) (a Answer, err error) {
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return a, err
	}
	for try := 0; ; try++ {
		length := 1
		if full {
			if a.Path, length, err = longest(conn); err != nil {
				return a, err
			}
		}
		if _, err = conn.Write(make([]byte, length)); err == nil {
			path := a.Path
			buf := make([]byte, 1<<16)
			if full && try < 3 { // an ICMP error may say that it was too long after all
				_ = conn.SetReadDeadline(time.Now().Add(time.Until(deadline) / 4))
			} else {
				_ = conn.SetReadDeadline(deadline)
			}
			n, readErr := conn.Read(buf)
			if err = readErr; err == nil {
				err = json.NewDecoder(strings.NewReader(string(buf[:n]))).Decode(&a)
				a.Path = path
				return a, err
			}
		}
		if !full || try == 3 {
			return a, err
		}
	}
}

// longest is the way's MTU as the kernel knows it, and what of it is left for a
// datagram's content.
func longest(conn *net.UDPConn) (mtu, content int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	v4 := conn.RemoteAddr().(*net.UDPAddr).IP.To4() != nil
	var inner error
	err = raw.Control(func(fd uintptr) {
		if v4 {
			inner = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			mtu, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU)
			content = mtu - 28
			return
		}
		inner = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
		mtu, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU)
		content = mtu - 48
	})
	// What one datagram can carry, where the MTU is a local one.
	return mtu, min(content, 65507-20), errors.Join(err, inner)
}
