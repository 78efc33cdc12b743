// SPDX-License-Identifier: Apache-2.0

package agent

// Health and health checks are served to whoever reaches the node, pods too: none of
// them may fill the agent's memory with connections, or keep others out.

import (
	"net"
	"net/netip"
	"slices"
	"sync"
)

// perClient is how many connections an address may have to one port. Its oldest ends
// for one more: others may come from behind it.
const perClient = 32

// clients is a listener that keeps to perClient. The node's own, by the loopback, have
// no limit.
type clients struct {
	net.Listener
	at   []netip.Prefix // connections to other addresses than these end at once; none: all are taken
	mu   sync.Mutex
	open map[netip.Addr][]*client
}

func newClients(l net.Listener) *clients {
	return &clients{Listener: l, open: map[netip.Addr][]*client{}}
}

// client is one connection.
type client struct {
	net.Conn
	of *clients
	at netip.Addr
}

// takes says whether a connection is to an address that is served.
func (l *clients) takes(conn net.Conn) bool {
	own, err := netip.ParseAddrPort(conn.LocalAddr().String())
	return len(l.at) == 0 || err == nil && slices.ContainsFunc(l.at, func(p netip.Prefix) bool { return p.Contains(own.Addr().Unmap().WithZone("")) })
}

// Accept implements net.Listener.
func (l *clients) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	for err == nil && !l.takes(conn) {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // reset, as where nobody listens
		}
		conn.Close()
		conn, err = l.Listener.Accept()
	}
	if err != nil {
		return nil, err
	}
	peer, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	if err != nil || peer.Addr().Unmap().IsLoopback() {
		return conn, nil
	}
	c := &client{conn, l, peer.Addr().Unmap().WithZone("")}
	l.mu.Lock()
	var oldest *client
	if list := l.open[c.at]; len(list) >= perClient {
		oldest = list[0]
	}
	l.open[c.at] = append(l.open[c.at], c)
	l.mu.Unlock()
	if oldest != nil {
		oldest.Close()
	}
	return c, nil
}

// Close implements net.Conn.
func (c *client) Close() error {
	c.of.mu.Lock()
	if list := slices.DeleteFunc(c.of.open[c.at], func(o *client) bool { return o == c }); len(list) > 0 {
		c.of.open[c.at] = list
	} else {
		delete(c.of.open, c.at)
	}
	c.of.mu.Unlock()
	return c.Conn.Close()
}
