// SPDX-License-Identifier: Apache-2.0

package cni

import "github.com/mustang-net/mustang/internal/link"

// keepDevice has what a host's device is like written down before a's pod gets it.
func (p *plugin) keepDevice(a *attachment, s *link.Spec) (err error) {
	if a.Mode != link.HostDevice {
		return nil
	}
	s.Taking = func(was link.Device) error {
		a.Device = &was
		return p.store.Write(a.file(), *a)
	}
	s.Device, err = p.deviceOf(*a)
	return err
}

// deviceOf is what a's device was like on the node, also by the record of a pod that had it
// before, has gone without a DEL, and left it to be found; nil: no record says it.
func (p *plugin) deviceOf(a attachment) (*link.Device, error) {
	if a.Device != nil || a.Mode != link.HostDevice {
		return a.Device, nil
	}
	all, err := p.store.List()
	for _, o := range all {
		if o.Mode == link.HostDevice && o.Uplink == a.Uplink && o.Device != nil {
			return o.Device, nil
		}
	}
	return nil, err
}
