// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net"
	"testing"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

func TestProbe(t *testing.T) {
	n := newNode(t)
	path := n.pod(2)
	if _, err := n.add(path); err != nil {
		t.Fatal(err)
	}
	s := svc("10.96.0.1:80", "10.9.0.1:80")
	s.Frontend.Protocol = state.UDP
	n.must(func(e *Engine) error { return e.AddServices(s) })
	var c net.Conn
	err := netns.Do(path, func() (err error) {
		c, err = net.Dial("udp", "10.96.0.1:80")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	n.must(func(e *Engine) error { return e.RemoveServices(s.Frontend) })
	_, err = c.Write([]byte("x"))
	t.Log(err)
}
