// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/masquerade"
)

// natLock is held while groups come and go: a group is removed with its last
// pod, which must not be while another ADD counts on it. An ADD's record is there
// before the engine hooks the table for it, under the same lock.
func (p *plugin) natLock(fn func() error) error { return masquerade.Locked(p.StateDir, fn) }

func (p *plugin) natTable() masquerade.Table {
	return masquerade.TableFor(p.StateDir, engine.DefaultStateDir)
}

// inside are the destinations that are not masqueraded: the configured ones,
// and the networks that the pods' addresses come from.
func (p *plugin) inside() []netip.Prefix {
	out := append([]netip.Prefix{}, p.exclude...)
	for _, pool := range p.IPAM.Pools {
		out = append(out, pool.Subnet)
	}
	return out
}

func (p *plugin) masqueradeGroup() string {
	if !p.Masquerade {
		return ""
	}
	return masquerade.Group(p.Name, p.inside())
}

func (p *plugin) masqueradeAdd(a attachment) error {
	if a.Masquerade == "" {
		return nil
	}
	return p.natLock(func() error { return p.natTable().Add(a.Masquerade, p.inside(), a.Addrs) })
}

// masqueradeRemove takes a's addresses out, and with the last attachment of a
// group the group.
func (p *plugin) masqueradeRemove(a attachment) error {
	if a.Masquerade == "" {
		return nil
	}
	return p.natLock(func() error {
		mine, err := p.stillIts(a) // who gets one next, puts it in under the same lock
		if err != nil {
			return err
		}
		if err := p.natTable().Remove(a.Masquerade, mine); err != nil {
			return err
		}
		if left, err := p.natTable().Members(a.Masquerade); err == nil && len(left) > 0 {
			return nil // somebody uses the group
		}
		return p.masqueradeTidy(a.file())
	})
}

// RestoreMasquerade puts the pods of a scope's attachments back into their groups of
// rules, where somebody has removed those, and says whether he had.
func RestoreMasquerade(scope engine.Scope) (restored bool, err error) {
	s, table := storeAt(scope.StateDir), masquerade.TableFor(scope.StateDir, engine.DefaultStateDir)
	err = masquerade.Locked(scope.StateDir, func() error {
		all, err := s.List()
		members := map[string][]netip.Addr{}
		for _, a := range all {
			if a.Masquerade == "" || a.State != stateReady {
				continue // its call does it
			}
			have, known := members[a.Masquerade]
			if !known {
				var unread error
				if have, unread = table.Members(a.Masquerade); unread != nil {
					return errors.Join(err, unread)
				}
				members[a.Masquerade] = have
			}
			if !slices.ContainsFunc(a.Addrs, func(ip netip.Addr) bool { return !slices.Contains(have, ip) }) {
				continue
			}
			c, wrong := configOf(a, scope)
			if wrong == nil {
				wrong = c.Validate() // which reads what is excluded
			}
			if wrong == nil {
				wrong = table.Add(a.Masquerade, (&plugin{Config: c}).inside(), a.Addrs)
			}
			err = errors.Join(err, wrong)
			restored = restored || wrong == nil
		}
		return err
	})
	return restored, err
}

// masqueradeTidy removes the groups that no attachment but the one called
// except uses.
func (p *plugin) masqueradeTidy(except string) error {
	all, err := p.store.List()
	if err != nil {
		return err
	}
	var used []string
	for _, a := range all {
		if a.file() != except && a.Masquerade != "" {
			used = append(used, a.Masquerade)
		}
	}
	return p.natTable().Keep(used)
}
