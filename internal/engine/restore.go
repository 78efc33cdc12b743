// SPDX-License-Identifier: Apache-2.0

package engine

// What is lost of a scope's two halves, the pins and the store, comes from the other as
// far as it can. A store without tables is what a bpffs leaves that was unmounted.

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/state"
)

// isLost says that ep's record went with the store: nobody knows its pod's path, nor
// whose it is, but what an agent has found out since.
func isLost(ep state.Endpoint) bool { return ep.Netns == "" }

// lostHostIf is the name of ep's host end, by its index in the tables.
func lostHostIf(ep state.Endpoint) string {
	if ep.Placement == state.InPod {
		return ""
	}
	l, err := netlink.LinkByIndex(ep.IfIndex)
	if err != nil {
		return ""
	}
	return l.Attrs().Name
}

// isAsRecorded says that the interface that r is about is still there.
func (e *Engine) isAsRecorded(r state.Endpoint) bool {
	if isLost(r) || !e.alive(r) || e.checkMAC(r) != nil {
		return false
	}
	if r.Placement == state.InPod {
		return true
	}
	l, err := netlink.LinkByIndex(r.IfIndex)
	return err == nil && l.Attrs().Name == r.HostIf
}

// unseen is why nobody can tell from here whether ep's pod is there: not even the directory
// is where its namespace would be. "": who does not find it knows that it is gone, as a
// process's own is with the process.
func unseen(ep state.Endpoint) string {
	dir := filepath.Dir(ep.Netns)
	if _, err := os.Stat(dir); isLost(ep) || strings.HasPrefix(dir, "/proc/") || !errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return fmt.Sprintf("there is no %s here, where its network namespace would be; where an agent runs, its host.netns must be the directory of the runtime's namespaces", dir)
}

// restore makes endpoints again of pods that are there, and that the tables do not know:
// nothing holds them to their policies any more. It goes on past errors, and the
// records of those that it cannot restore stay.
func (e *Engine) restore(records map[uint32]state.Endpoint) {
	for id, r := range records {
		if _, ok := e.known[id]; ok {
			continue
		}
		if why := unseen(r); why != "" {
			e.opts.Notify(fmt.Sprintf("endpoint %d (%s in %s) was lost with the tables, and its pod, if it is there, is held to nothing: %s", id, r.IfName, r.Netns, why))
		}
		if !e.isAsRecorded(r) {
			continue
		}
		what := "and is restored"
		if err := e.restoreOne(r); err != nil {
			what = fmt.Sprintf("and cannot be restored: %v; make its pod anew", err)
		}
		e.opts.Notify(fmt.Sprintf("endpoint %d (%s in %s) was lost with the tables, %s", id, r.IfName, r.Netns, what))
	}
}

// lostNodes journals, before there are tables again, the list of nodes that went with the
// last ones: this opening brings it into force, or the next, should it be killed.
func (e *Engine) lostNodes() (op operation, lost bool, err error) {
	n, err := e.store.Nodes()
	if err != nil || len(n.Nodes) == 0 {
		return op, false, err
	}
	e.opts.Notify("the nodes were lost with the tables, and are brought into force again")
	op = operation{Kind: opNodes, Nodes: &n}
	return op, true, e.store.WriteJournal(op)
}

// lostServices forgets what was recorded of Services that went with the tables: without their
// frontends they would be in the way of those that are given again.
func (e *Engine) lostServices() error {
	list, err := e.store.Services()
	if err != nil {
		return err
	}
	for _, s := range list {
		if s.Owner == state.OwnerCLI {
			e.opts.Notify(fmt.Sprintf("service %s was lost with the tables; give it again", s.Name))
		}
		err = errors.Join(err, e.store.DeleteService(s.ServiceID))
	}
	return err
}

// restoreOne attaches the programs first, which drop what the tables do not know: who is
// killed in between leaves an endpoint that is closed, and restored by the next opening.
func (e *Engine) restoreOne(ep state.Endpoint) error {
	err := e.ensurePrograms(ep)
	if err == nil {
		ep.Generation, err = e.dp.ComingGeneration()
	}
	if err == nil {
		err = e.attach(ep)
	}
	if err != nil {
		return err
	}
	if err := e.install(ep); err != nil {
		return errors.Join(err, e.endpointTables().Delete(ep, e.known))
	}
	e.known[ep.ID] = ep
	return nil
}

// unheld are the endpoints whose interfaces are there, and do not have their programs:
// somebody has taken them off. It goes on past errors.
func (e *Engine) unheld() (out []state.Endpoint, err error) {
	all, err := e.Endpoints()
	for _, ep := range all {
		held, unknown := e.isHeld(ep)
		if unknown != nil {
			err = errors.Join(err, fmt.Errorf("look at the programs of endpoint %d: %w", ep.ID, unknown))
		} else if !held && !isLost(ep) && e.alive(ep) {
			out = append(out, ep)
		}
	}
	return out, err
}

// isHeld says whether ep's interface has its programs: also by the links that a killed
// process was about to write down (settle.go).
func (e *Engine) isHeld(ep state.Endpoint) (held bool, err error) {
	err = e.atHook(ep, func() (err error) {
		held, err = e.dp.Attached(ep)
		return err
	})
	if err != nil || held || ep.Attach != datapath.AttachClsact {
		return held, err
	}
	ep.Attach = datapath.AttachTCX
	return e.dp.Attached(ep)
}

// Reattach gives programs to the endpoints that have lost theirs, as to another's tool
// that removes all filters, and answers those. It goes on past errors.
func (e *Engine) Reattach() (back []state.Endpoint, err error) {
	if e.dp == nil {
		return nil, nil
	}
	list, err := e.unheld()
	for _, ep := range list {
		if failed := e.attach(ep); failed != nil {
			err = errors.Join(err, fmt.Errorf("endpoint %d: %w", ep.ID, failed))
			continue
		}
		back = append(back, ep)
	}
	return back, err
}
