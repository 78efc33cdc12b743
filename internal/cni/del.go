// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/state"
)

// del takes a container off the network. What is absent is success: with or
// without namespace, prevResult and record.
func (p *plugin) del() error {
	if err := p.settle(p.attachment()); err != nil {
		return err
	}
	a, found, err := p.store.condemn(p.attachment(), p.by)
	if err != nil {
		return err
	}
	if found && p.env.netns != "" && a.NetNS != p.env.netns {
		p.warn("DEL of %s names another namespace (%s) than its ADD did (%s)", a.key(), p.env.netns, a.NetNS)
	}
	// Without a record it was done before, or never ADDed, or the records are
	// lost: what carries the container's own name is removed.
	a.HostPorts = a.HostPorts || !found
	if err := p.undo(a, false); err != nil {
		return err
	}
	return p.store.Forget(a.file())
}

// settle waits until no agent works on an attachment any more whose plugin was
// killed. Only then is its record another's to write.
func (p *plugin) settle(a attachment) error {
	if p.by.agent != nil {
		return nil // an agent does one call of an attachment at a time
	}
	r, found, err := p.store.find(a)
	if err != nil || !found || !r.Agent {
		return err
	}
	_, err = p.node(request{Op: opSettle, Key: r.file()})
	return err
}

// undo removes all of an attachment but its record. It works on any half of
// one, does every step whatever the others say, and can be done again. shared: an
// endpoint in a's place is another's, unless it has a's id.
func (p *plugin) undo(a attachment, shared bool) error {
	where := a.whereabouts()
	where.Shared = shared || a.Endpoint != 0
	if a.Endpoint == 0 {
		theirs, err := p.isAnothers(a)
		if err != nil {
			return err
		}
		if theirs {
			a.NetNS, where.Shared = "", true
		}
	}
	release := func() error {
		err := p.release(a)
		if err != nil && (leases(a.IPAM) || p.leaves) { // a lease ends by itself (spec, DEL)
			p.warn("%v", err)
			return nil
		}
		return err
	}
	var errs []error
	if leases(a.IPAM) { // the network is told by the interface
		errs = append(errs, release())
	}
	errs = append(append(errs, p.disconnect(a, where)...), p.masqueradeRemove(a))
	if err := errors.Join(errs...); err != nil || leases(a.IPAM) {
		return err // nobody gets the addresses while anything leads to this one by them
	}
	return release()
}

// stillIts are a's addresses but those that another attachment has by now: what
// leads to them is not a's to remove.
func (p *plugin) stillIts(a attachment) ([]netip.Addr, error) {
	another := func(addr netip.Addr) bool {
		owner := p.store.ipam().Owner(addr)
		return owner != "" && owner != a.owner()
	}
	if a.IPAM != OwnIPAM && len(a.Addrs) > 0 {
		all, err := p.store.List()
		if err != nil {
			return nil, err
		}
		another = func(addr netip.Addr) bool {
			return slices.ContainsFunc(all, func(o attachment) bool { return o.file() != a.file() && slices.Contains(o.Addrs, addr) })
		}
	}
	return slices.DeleteFunc(slices.Clone(a.Addrs), another), nil
}

// disconnect removes interface and endpoint. An interface of ours goes before
// its programs do, so that it is never up without them; but a device that comes
// back to the node must not bring them along. Without an id, the endpoint is told
// by its device's having left the place.
func (p *plugin) disconnect(a attachment, where engine.Whereabouts) []error {
	switch {
	case a.Mode == Chained:
		return []error{p.detach(a, where)}
	case a.Mode == link.HostDevice && a.Endpoint != 0:
		return []error{p.detach(a, where), p.deleteLink(a)}
	}
	return []error{p.deleteLink(a), p.detach(a, where)}
}

// deleteLink takes the interface away, and what leads to a on the node by its addresses.
func (p *plugin) deleteLink(a attachment) error {
	mine, unread := p.stillIts(a)
	a.Addrs = mine // none, when nobody can tell
	s := a.linkSpec()
	var err error
	if s.Device, err = p.deviceOf(a); err != nil {
		return err // it would come back as another
	}
	s.Here = p.here
	if a.NetNS == "" { // it has none any more
		s.Here.NetNS = ""
	}
	return errors.Join(unread, link.Delete(s))
}

// isAnothers says that another container is, or is to be, where a is: its path
// was used again after a's namespace was gone, or an ADD is refused for that reason.
func (p *plugin) isAnothers(a attachment) (bool, error) {
	all, err := p.store.List()
	return slices.ContainsFunc(all, func(o attachment) bool {
		return o.NetNS == a.NetNS && o.IfName == a.IfName && o.file() != a.file()
	}), err
}

// detach takes the datapath off.
func (p *plugin) detach(a attachment, where engine.Whereabouts) error {
	_, err := p.node(request{Op: opRemove, Sweep: a.HostPorts, Where: where})
	return err
}

// whereabouts are what the engine can find a's endpoint by. In mode chained the
// interface outlives a DEL, so that one whose id is not known is a living one.
func (a attachment) whereabouts() engine.Whereabouts {
	return engine.Whereabouts{ID: a.Endpoint, Netns: a.NetNS, IfName: a.IfName, HostIfIndex: hostIndex(a), Owner: state.OwnerCNI,
		Living: a.Mode == Chained}
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

// release gives the addresses back, to who gave them: by the configuration of then
// when this call's would have them looked for elsewhere.
func (p *plugin) release(a attachment) error {
	switch a.IPAM {
	case "":
		return nil
	case OwnIPAM:
		return p.store.ipam().Release(a.owner())
	}
	config := p.raw
	if len(a.Config) > 0 && (p.env.command == "GC" || !sameIPAM(a.Config, p.raw)) {
		config = a.Config
	}
	c := call{"DEL", a.ContainerID, a.NetNS, a.IfName, a.Args, p.env.path}
	if _, err := delegate(a.IPAM, config, c); err != nil {
		return fmt.Errorf("release the addresses of %s by %s: %w", a.key(), a.IPAM, err)
	}
	return nil
}

// sameIPAM says whether two configurations are one to an IPAM plugin, which keeps what it
// gives by the network's name and as its own object says.
func sameIPAM(a, b []byte) bool {
	var of [2]struct {
		Name string `json:"name"`
		IPAM any    `json:"ipam"`
	}
	err := errors.Join(json.Unmarshal(a, &of[0]), json.Unmarshal(b, &of[1]))
	return err == nil && reflect.DeepEqual(of[0], of[1])
}
