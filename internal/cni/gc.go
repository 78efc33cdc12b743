// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// gc removes what belongs to this network and is not in
// cni.dev/valid-attachments, and goes on past errors.
func (p *plugin) gc() error {
	if p.Valid == nil {
		return invalid("cni.dev/valid-attachments", "is missing: without it everything would be removed")
	}
	all, err := p.store.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range all {
		if a.Network != p.Name || p.isValid(a) {
			continue
		}
		if err := p.collect(a); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", a.key(), err))
		}
	}
	// The runtime lets no ADD or DEL run beside GC (spec, section 3).
	errs = append(errs, p.store.Sweep(), p.collectEndpoints(), p.collectAddresses(), p.collectMasquerade())
	if p.IPAM.Type != "" && p.IPAM.Type != OwnIPAM {
		if _, err := delegate(p.IPAM.Type, p.raw, p.env); err != nil {
			errs = append(errs, fmt.Errorf("IPAM plugin %s: %w", p.IPAM.Type, err))
		}
	}
	return errors.Join(errs...)
}

func (p *plugin) isValid(a attachment) bool {
	return slices.Contains(*p.Valid, Attachment{a.ContainerID, a.IfName})
}

func (p *plugin) collect(a attachment) error {
	if err := p.settle(a); err != nil {
		return err
	}
	r, found, err := p.store.condemn(a, p.by)
	if err != nil || !found {
		return err
	}
	if err := p.undo(r, false); err != nil {
		return err
	}
	return p.store.Forget(r.file())
}

// collectEndpoints removes those of ours whose interfaces are gone and whose
// attachments nobody knows: adopted pods', and those of lost records.
func (p *plugin) collectEndpoints() error {
	left, err := p.store.List()
	if err != nil {
		return err
	}
	var keep []uint32
	for _, a := range left {
		keep = append(keep, a.Endpoint)
	}
	_, err = p.node(request{Op: opCollect, Keep: keep})
	return err
}

// collectAddresses frees this network's addresses that have no attachment, and those of
// strangers that are gone.
func (p *plugin) collectAddresses() error {
	left, err := p.store.List()
	if err != nil {
		return err
	}
	_, err = p.store.ipam().ReleaseWhere(func(owner string) bool {
		return p.isGone(owner) || strings.HasPrefix(owner, ownerPrefix(p.Name)) && !slices.ContainsFunc(left, func(a attachment) bool { return a.owner() == owner })
	})
	return err
}

// collectMasquerade takes out of the groups what no attachment has.
func (p *plugin) collectMasquerade() error {
	return p.natLock(func() error {
		left, err := p.store.List()
		if err != nil {
			return err
		}
		pods := make(map[string][]netip.Addr)
		for _, a := range left {
			if a.Masquerade != "" {
				pods[a.Masquerade] = append(pods[a.Masquerade], a.Addrs...)
			}
		}
		var errs []error
		for group, keep := range pods {
			members, err := p.natTable().Members(group)
			gone := slices.DeleteFunc(members, func(a netip.Addr) bool { return slices.Contains(keep, a) })
			errs = append(errs, err, p.natTable().Remove(group, gone))
		}
		return errors.Join(append(errs, p.masqueradeTidy(""))...)
	})
}
