// SPDX-License-Identifier: Apache-2.0

package main

// The records of made pods: one small file a pod, written before the pod is
// made, so that a later process finds and finishes or undoes what an earlier
// one began.

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/record"
)

const (
	podMaking = "making"
	podReady  = "ready"
)

// podRecord is what is known of one pod.
type podRecord struct {
	Name       string       `json:"name"`
	State      string       `json:"state"`
	Maker      record.Maker `json:"maker"`
	Mode       string       `json:"mode"`
	IPv4       netip.Prefix `json:"ipv4,omitzero"`
	IPv6       netip.Prefix `json:"ipv6,omitzero"`
	NetNS      string       `json:"netns"`
	OwnNetNS   bool         `json:"ownNetns"` // made by pod add, removed by pod rm
	IfName     string       `json:"ifname"`
	HostIfName string       `json:"hostIfname"`
	Uplink     string       `json:"uplink,omitempty"`
	Datapath   string       `json:"datapath"` // "plain" or the service path
	Endpoint   uint32       `json:"endpoint,omitzero"`
	LocalMTU   int          `json:"localMtu,omitzero"`
	BigTCP4    int          `json:"bigTcpIpv4,omitzero"`
	BigTCP6    int          `json:"bigTcpIpv6,omitzero"`
	Device     *link.Device `json:"device,omitempty"` // host-device: what it was like before
}

// linkSpec is enough of a link.Spec to delete the connection.
func (r podRecord) linkSpec() link.Spec {
	s := link.Spec{Name: r.Name, Mode: r.Mode, NetNS: r.NetNS, IfName: r.IfName, HostIfName: link.HostName(r.Name),
		IPv4: r.IPv4, IPv6: r.IPv6, Uplink: r.Uplink, Device: r.Device}
	if r.Mode == link.HostDevice {
		s.Uplink = r.HostIfName
	}
	return s
}

// ips lists the pod's addresses, without prefix lengths.
func (r podRecord) ips() (out []string) {
	for _, p := range []netip.Prefix{r.IPv4, r.IPv6} {
		if p.IsValid() {
			out = append(out, p.Addr().String())
		}
	}
	return out
}

// podStore is a directory of records.
type podStore struct{ record.Dir[podRecord] }

func newPodStore(stateDir string) podStore {
	return podStore{record.Dir[podRecord]{Path: filepath.Join(stateDir, "pods")}}
}

func (s podStore) write(r podRecord) error {
	if err := s.Write(r.Name, r); err != nil {
		return fmt.Errorf("write record of pod %s: %w", r.Name, err)
	}
	return nil
}

func (s podStore) forget(name string) error {
	if err := s.Forget(name); err != nil {
		return fmt.Errorf("remove record of pod %s: %w", name, err)
	}
	return nil
}

// claim takes the name of r and its addresses, by a record in state "making".
// When a killed process left a record under that name, claim takes that one
// over and returns it: it must be undone before r is written.
func (s podStore) claim(r podRecord) (left *podRecord, err error) {
	err = s.Locked(func() error {
		all, err := s.List()
		if err != nil {
			return err
		}
		for _, other := range all {
			if other.Name == r.Name {
				if err := other.takeable(); err != nil {
					return err
				}
				left = &other
				continue
			}
			for _, ip := range r.ips() {
				if slices.Contains(other.ips(), ip) {
					return fmt.Errorf("--ip: %s is pod %s's: choose another address", ip, other.Name)
				}
			}
		}
		if left == nil {
			return s.write(r)
		}
		left.Maker = r.Maker
		return s.write(*left)
	})
	return left, err
}

// takeable says whether another process may go on from this record.
func (r podRecord) takeable() error {
	switch {
	case r.State == podReady:
		return fmt.Errorf("name: pod %s exists: choose another name, or `mustang pod rm %s` first", r.Name, r.Name)
	case r.Maker.AliveElsewhere():
		return fmt.Errorf("name: pod %s is being worked on by process %d: wait for it", r.Name, r.Maker.PID)
	}
	return nil
}
