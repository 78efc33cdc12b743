// SPDX-License-Identifier: Apache-2.0

package cni

// Containers that went without a DEL: a runtime that lost its state knows of none that it
// had, and calls no GC for a list before version 1.1.0. Who is dead holds no address.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/mustang-net/mustang/internal/ipam"
)

// withoutDead tries, and tries again as long as there is no address and somebody has one who
// is gone: strangers first, who have nothing else, then one attachment after the other.
func (p *plugin) withoutDead(try func() error) error {
	full := func(err error) bool { return errors.Is(err, ipam.ErrExhausted) || errors.Is(err, ipam.ErrTaken) }
	err := try()
	if full(err) {
		if freed, _ := p.store.ipam().ReleaseWhere(p.isGone); len(freed) > 0 {
			err = try()
		}
	}
	if !full(err) {
		return err
	}
	dead, yours, unread := p.dead()
	if unread != nil {
		return errors.Join(err, unread)
	}
	for _, a := range dead {
		if failed := p.reap(a); failed != nil {
			return errors.Join(err, fmt.Errorf("remove container %s, interface %s, whose network namespace %s is gone: %w", a.ContainerID, a.IfName, a.NetNS, failed))
		}
		if err = try(); !full(err) {
			return err
		}
	}
	if yours {
		return errYours
	}
	return err
}

// dead are the attachments with addresses of own pools that were ready, and whose network
// namespaces are gone. yours: there may be more, which are not the agent's to remove.
func (p *plugin) dead() (list []attachment, yours bool, err error) {
	all, err := p.store.List()
	for _, a := range all {
		if a.State != stateReady || a.IPAM != OwnIPAM {
			continue
		}
		gone := isAbsent(a.NetNS)
		switch {
		case p.by.agent != nil && (!p.sees(a.NetNS) || gone && !fits(a.Mode, a.IPAM)):
			yours = true
		case gone && p.sees(a.NetNS):
			list = append(list, a)
		}
	}
	return list, yours, err
}

// isAbsent says that there is nothing at path. A link that leads nowhere here may lead
// somewhere in the runtime's files.
func isAbsent(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// reap removes an attachment whose network namespace is gone, unless another call is about
// it. A DEL that comes late finds nothing of it, and takes nothing of others.
func (p *plugin) reap(a attachment) error {
	if p.by.agent != nil {
		unlock, free := p.by.agent.alone(a.file())
		if !free {
			return nil
		}
		defer unlock()
	}
	r, found, err := p.store.condemnIf(a, p.by, func(r attachment) bool {
		return r.State == stateReady && r.NetNS == a.NetNS && isAbsent(r.NetNS)
	})
	if err != nil || !found {
		return err
	}
	of := *p
	of.here.NetNS = "" // that one is of the container that is added
	if err := of.undo(r, false); err != nil {
		r.State, r.Agent = stateReady, false // for the next to try, and any half can be undone
		return errors.Join(err, p.store.Write(r.file(), r))
	}
	return p.store.Forget(r.file())
}

func (t taken) alone(key string) (unlock func(), free bool) {
	now, cancel := context.WithCancel(context.Background())
	cancel() // nobody waits: two ADDs could, for each other
	unlock, err := t.s.calls.lock(now, key)
	return unlock, err == nil
}
