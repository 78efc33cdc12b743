// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/state"
)

// del takes a container off the network. What is absent is success: with or
// without namespace, prevResult and record.
func (p *plugin) del() error {
	a, found, err := p.store.condemn(p.attachment())
	if err != nil {
		return err
	}
	if !found {
		return p.delUnknown(a)
	}
	if p.env.netns != "" && a.NetNS != p.env.netns {
		warn("DEL of %s names another namespace (%s) than its ADD did (%s)", a.key(), p.env.netns, a.NetNS)
	}
	if err := p.undo(a); err != nil {
		return err
	}
	return p.store.Forget(a.file())
}

// delUnknown is DEL without a record: it was done before, or never ADDed, or
// the records are lost. What carries the container's own name is removed.
func (p *plugin) delUnknown(a attachment) error {
	others, err := p.store.List()
	if err != nil {
		return err
	}
	// After an ADD that was refused because the interface was there: it is
	// another container's.
	if a.NetNS != "" && slices.ContainsFunc(others, func(o attachment) bool { return o.NetNS == a.NetNS && o.IfName == a.IfName }) {
		a.NetNS = ""
	}
	return p.undo(a)
}

// undo removes all of an attachment but its record. It works on any half of
// one, does every step whatever the others say, and can be done again.
func (p *plugin) undo(a attachment) error {
	errs := []error{p.detach(a)}
	if a.Mode != Chained {
		errs = append(errs, link.Delete(a.linkSpec()))
	}
	errs = append(errs, p.masqueradeRemove(a), p.release(a))
	return errors.Join(errs...)
}

// detach takes the datapath off, by the endpoint's id, or by where it is.
func (p *plugin) detach(a attachment) error {
	return p.engine(true, func(e *engine.Engine) error {
		id, err := e.EndpointOf(engine.Whereabouts{ID: a.Endpoint, Netns: a.NetNS, IfName: a.IfName, HostIfIndex: hostIndex(a), Owner: state.OwnerCNI})
		if errors.Is(err, engine.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return e.RemoveEndpoint(id)
	})
}

// hostIndex is the interface on the node that only this attachment can have.
func hostIndex(a attachment) int {
	if a.Mode == Chained {
		return 0
	}
	l, err := netlink.LinkByName(link.HostName(a.key()))
	if err != nil {
		return 0
	}
	return l.Attrs().Index
}

// release gives the addresses back.
func (p *plugin) release(a attachment) error {
	switch a.IPAM {
	case "":
		return nil
	case OwnIPAM:
		return p.store.ipam().Release(a.owner())
	}
	config := p.raw
	if p.env.command == "GC" && len(a.Config) > 0 {
		config = a.Config
	}
	c := call{"DEL", a.ContainerID, a.NetNS, a.IfName, a.Args, p.env.path}
	if _, err := delegate(a.IPAM, config, c); err != nil {
		return fmt.Errorf("release the addresses of %s by %s: %w", a.key(), a.IPAM, err)
	}
	return nil
}
