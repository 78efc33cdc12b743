// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"
)

// from is a connection to a server of the agent's by a client that has this address.
type from struct {
	net.Conn
	addr net.Addr
}

func (f from) RemoteAddr() net.Addr { return f.addr }

// asFrom is a listener whose clients say who they are in what they send first.
type asFrom struct{ net.Listener }

func (l asFrom) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	var last [1]byte
	if _, err := io.ReadFull(conn, last[:]); err != nil {
		return nil, err
	}
	return from{conn, &net.TCPAddr{IP: net.IPv4(10, 1, 0, last[0]), Port: 1}}, nil
}

// Who opens connections without end has a bounded number, and keeps nobody out.
func TestNoClientTakesTheOthersConnections(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	held := newClients(asFrom{l})
	served := make(chan error)
	s := newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	go func() { served <- s.Serve(held) }()
	defer func() {
		s.Close()
		<-served
		held.mu.Lock()
		defer held.mu.Unlock()
		if len(held.open) != 0 {
			t.Errorf("connections are remembered that ended: %v", held.open)
		}
	}()
	dial := func(last byte) net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := c.Write([]byte{last}); err != nil {
			t.Fatal(err)
		}
		return c
	}
	answered := func(c net.Conn) error {
		if err := c.SetDeadline(time.Now().Add(3 * time.Second)); err != nil {
			return err
		}
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			return err
		}
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			r.Body.Close()
		}
		return err
	}
	other := dial(2)
	if err := answered(other); err != nil { // it is accepted
		t.Fatal(err)
	}
	var list []net.Conn
	for range 3 * perClient {
		list = append(list, dial(1))
	}
	last := dial(1)
	for what, c := range map[string]net.Conn{"the newest": last, "another client": other, "another client's next": dial(2)} {
		if err := answered(c); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := answered(list[0]); err == nil {
		t.Error("the oldest connection of many is served still")
	}
	held.mu.Lock()
	if n := len(held.open[(&net.TCPAddr{IP: net.IPv4(10, 1, 0, 1)}).AddrPort().Addr().Unmap()]); n != perClient {
		t.Errorf("it has %d connections, want %d", n, perClient)
	}
	held.mu.Unlock()
}

// What a client sends, and does not take, is bounded, too.
func TestALongRequestIsRefused(t *testing.T) {
	s := httptest.NewUnstartedServer(nil)
	s.Config = newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	s.Start()
	defer s.Close()
	for length, want := range map[int]int{1 << 10: http.StatusOK, 64 << 10: http.StatusRequestHeaderFieldsTooLarge} {
		r, err := http.NewRequest(http.MethodGet, s.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X", strings.Repeat("x", length))
		answer, err := s.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("%d bytes: %s", length, answer.Status)
		}
	}
	if s.Config.WriteTimeout == 0 || s.Config.ReadTimeout == 0 {
		t.Error("a client may take all the time that there is")
	}
}

// A node port's health check is at the addresses of node ports alone.
func TestConnectionsToOtherAddressesAreReset(t *testing.T) {
	for at, answered := range map[string]bool{"": true, "127.0.0.0/8": true, "192.0.2.0/24": false} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		held := newClients(l)
		if at != "" {
			held.at = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix(at)}
		}
		s := newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		served := make(chan error)
		go func() { served <- s.Serve(held) }()
		client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
		answer, err := client.Get("http://" + l.Addr().String())
		if err == nil {
			answer.Body.Close()
		}
		if (err == nil) != answered || err != nil && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
			t.Errorf("at %q: %v", at, err)
		}
		s.Close()
		<-served
	}
}
