// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// Links are an endpoint's entry programs with links of tcx that nothing keeps
// yet: Close takes off what was not kept.
type Links struct {
	ep    state.Endpoint
	progs [2]*ebpf.Program
	links [2]link.Link
}

// NewLinks loads what is to be attached to ep's interface. From then on until
// Settled a packet may meet links and filters.
func (d *Datapath) NewLinks(ep state.Endpoint) (*Links, error) {
	l := &Links{ep: ep}
	for i, h := range hooks(ep) {
		p, err := d.entryProgram(ep.ID, h.slot)
		if err != nil {
			return nil, errors.Join(err, l.Close())
		}
		l.progs[i] = p
	}
	if err := d.settling(ep.ID, true); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Settled says of an endpoint that its packets meet links or filters, and not both.
func (d *Datapath) Settled(id uint32) error { return d.settling(id, false) }

func (d *Datapath) settling(id uint32, on bool) error {
	slot, _, err := d.Endpoints.Get(id)
	if err != nil || slot.Generation == 0 {
		return err
	}
	slot.Flags &^= bpfgen.EPSettling
	if on {
		slot.Flags |= bpfgen.EPSettling
	}
	return d.Endpoints.Put([]uint32{id}, []EndpointSlot{slot})
}

// Attach puts the programs before whatever is there, and waits for two grace
// periods of the kernel. It touches nothing of the datapath's.
func (l *Links) Attach() (err error) {
	for i, h := range hooks(l.ep) {
		if l.links[i], err = createTCX(l.ep.IfIndex, h, l.progs[i]); err != nil {
			return fmt.Errorf("attach to interface %d: %w", l.ep.IfIndex, err)
		}
	}
	return nil
}

// KeepLinks makes the links outlive the process. One that is kept already, by a
// process that was killed after it did, stays.
func (d *Datapath) KeepLinks(l *Links) error {
	ep := l.ep
	ep.Attach = AttachTCX
	for i, h := range hooks(ep) {
		alive, err := d.linkAlive(ep, h)
		if err != nil {
			return err
		}
		if alive {
			continue
		}
		if err := l.links[i].Pin(d.linkPin(l.ep.ID, h.name)); err != nil {
			return fmt.Errorf("pin link: %w", err)
		}
	}
	return nil
}

// Close lets go of programs and links.
func (l *Links) Close() error {
	var errs []error
	for i := range l.links {
		if l.links[i] != nil {
			errs = append(errs, l.links[i].Close())
		}
		if l.progs[i] != nil {
			errs = append(errs, l.progs[i].Close())
		}
	}
	return errors.Join(errs...)
}
