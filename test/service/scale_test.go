// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"net"
	"sync"
	"testing"

	"github.com/mustang-net/mustang/lab"
)

// TestTenThousandConnections holds them open through one Service at once, all of
// them answering, in each mode and both ways of doing Services.
func TestTenThousandConnections(t *testing.T) {
	if testing.Short() {
		t.Skip("half a minute for each mode: make test runs it")
	}
	const workers = 16
	for _, mode := range modes() {
		for _, path := range chosen(pathsVariable, lab.MustangTC, lab.MustangSocket) {
			t.Run(string(mode)+"/"+string(path), func(t *testing.T) {
				w := newWorld(t, mode, path)
				for _, family := range []string{"ipv4", "ipv6"} {
					t.Run(family, func(t *testing.T) { w.on(t, family).many(connections, workers) })
				}
			})
		}
	}
}

func (w *world) many(total, workers int) {
	conns := make([]net.Conn, total)
	each := func(fn func(i int) error) {
		var wg sync.WaitGroup
		errs := make([]error, workers)
		for k := range workers {
			wg.Go(func() {
				for i := k; i < total && errs[k] == nil; i += workers {
					errs[k] = fn(i)
				}
			})
		}
		wg.Wait()
		for _, err := range errs {
			w.must(err)
		}
	}
	defer func() {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
	}()
	each(func(i int) (err error) {
		conns[i], err = dial(w.client, "tcp", w.service(), 0)
		return err
	})
	for range 2 {
		each(func(i int) error {
			_, _, err := who(conns[i])
			return err
		})
	}
}
