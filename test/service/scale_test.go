// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"net"
	"sync"
	"testing"
)

// connectionsAtOnce holds ten thousand open through one Service, all of
// which work.
func (w *world) connectionsAtOnce() {
	if testing.Short() {
		w.t.Skip("half a minute for each mode: make test runs it")
	}
	w.many(connections, 16)
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
			conns[i].SetDeadline(deadline()) // that of its making is long over
			_, _, err := who(conns[i])
			return err
		})
	}
}
