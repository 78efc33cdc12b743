// SPDX-License-Identifier: Apache-2.0

package engine

// What an agent needs of an engine that it keeps open, and others of an agent.

import (
	"errors"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
	"github.com/mustang-net/mustang/internal/store"
)

// Lend makes e somebody else's until the next Close, which gives it back:
// notify gets what there is to tell meanwhile.
func (e *Engine) Lend(notify func(string)) *Engine {
	if e.lender == nil {
		e.lender = e.opts.Notify
	}
	e.opts.Notify = notify
	return e
}

// giveBack is Close of one who has borrowed e; false: e is its owner's.
func (e *Engine) giveBack() bool {
	if e.lender == nil {
		return false
	}
	e.opts.Notify, e.lender = e.lender, nil
	return true
}

// SetPlace says who this node is, and where. Services are planned by it from
// their next change on: replace them all.
func (e *Engine) SetPlace(node service.Node) {
	e.opts.Node = node
	if e.catalog != nil { // who holds what stays
		e.catalog.SetNode(node)
	}
}

// MoveSockets has the sockets under the scope's cgroup root led to Services, where the programs are at another's still.
func (e *Engine) MoveSockets() (moved bool, err error) {
	if e.dp == nil {
		return false, nil
	}
	return e.dp.MoveSock(e.scope.cgroupRoot)
}

// Upgrade puts this build's programs in the place of another's, if there are any, as the
// next endpoint would: where none comes, an upgrade would not be one.
func (e *Engine) Upgrade() (upgraded bool, err error) {
	if e.dp == nil {
		return false, nil
	}
	if other, err := e.dp.OfAnother(); err != nil || !other {
		return false, err
	}
	return true, e.dp.EnsurePrograms(state.Endpoint{})
}

// Tables describes the scope's tables. Unlike the rest of an Engine, it may be
// called while another goroutine uses it.
func (e *Engine) Tables() ([]datapath.TableInfo, error) {
	if e.dp == nil {
		return nil, nil
	}
	return e.dp.Tables()
}

// EndpointAddrs are the addresses of this node's endpoints. It may be called while another
// goroutine uses the Engine.
func (e *Engine) EndpointAddrs() (map[netip.Addr]bool, error) {
	if e.dp == nil {
		return nil, nil
	}
	list, err := e.dp.Addrs.All()
	out := make(map[netip.Addr]bool, len(list))
	for a := range list {
		out[datapath.ToAddr(a)] = true
	}
	return out, err
}

// Drops are the packets dropped so far, by reason and direction. It may be
// called while another goroutine uses the Engine.
func (e *Engine) Drops() ([]Drop, error) {
	if e.dp == nil {
		return nil, nil
	}
	return e.drops()
}

// Held says whether another process works on the scope, or on another with its state directory.
func (s Scope) Held() bool {
	s = s.withDefaults()
	for _, path := range []string{store.At(s.StateDir).ScopeFile(), s.BPFFS} {
		f, err := os.Open(path)
		if err != nil {
			continue // it does not exist, or opening it will tell
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return true
		}
	}
	return false
}
