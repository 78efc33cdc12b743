// SPDX-License-Identifier: Apache-2.0

package cni

// The record of one attachment: written before anything of it is made, and
// removed after the last of it is gone.

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/mustang-net/mustang/internal/ipam"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/record"
)

const (
	stateMaking = "making" // or being unmade
	stateReady  = "ready"
)

// attachment is what is known of one interface of one container.
type attachment struct {
	ContainerID string            `json:"containerID"`
	IfName      string            `json:"ifname"`
	Network     string            `json:"network"`
	State       string            `json:"state"`
	Maker       record.Maker      `json:"maker"`
	Agent       bool              `json:"agent,omitempty"` // an agent works on it, for the maker
	Mode        string            `json:"mode"`
	NetNS       string            `json:"netns"`
	Bridge      string            `json:"bridge,omitempty"`
	Uplink      string            `json:"uplink,omitempty"`
	IPAM        string            `json:"ipam,omitempty"`
	Args        string            `json:"args,omitempty"`
	Endpoint    uint32            `json:"endpoint,omitempty"` // its id, once it is ready
	Addrs       []netip.Addr      `json:"addrs,omitempty"`
	Given       []ipam.Allocation `json:"given,omitempty"`      // by a delegated IPAM plugin
	Masquerade  string            `json:"masquerade,omitempty"` // the group of rules that it is in
	Bandwidth   json.RawMessage   `json:"bandwidth,omitempty"`  // that another plugin gives it
	HostPorts   bool              `json:"hostPorts,omitempty"`  // it may have some
	Device      *link.Device      `json:"device,omitempty"`     // host-device: what it was like before
	Config      json.RawMessage   `json:"config"`               // for IPAM plugins, when GC must speak for a runtime
}

// key is the attachment's name for people and for link names.
func (a attachment) key() string { return a.ContainerID + ":" + a.IfName }

// owner is the attachment's name among the allocations.
func (a attachment) owner() string { return ownerPrefix(a.Network) + a.ContainerID + "@" + a.IfName }

func ownerPrefix(network string) string { return network + "/" }

// file is the record's name: readable, unless that were too long for a file.
func (a attachment) file() string {
	if len(a.ContainerID) > 128 {
		sum := sha256.Sum256([]byte(a.ContainerID))
		return hex.EncodeToString(sum[:]) + "@" + a.IfName
	}
	return a.ContainerID + "@" + a.IfName
}

// linkSpec is enough of a link.Spec to delete the connection.
func (a attachment) linkSpec() link.Spec {
	s := link.Spec{Name: a.key(), Mode: a.Mode, NetNS: a.NetNS, IfName: a.IfName, HostIfName: link.HostName(a.key()),
		BridgeName: a.Bridge, Uplink: a.Uplink}
	for _, addr := range a.Addrs {
		if p := netip.PrefixFrom(addr, addr.BitLen()); addr.Is4() {
			s.IPv4 = p
		} else {
			s.IPv6 = p
		}
	}
	return s
}

// store holds the attachments of one scope.
type store struct {
	record.Dir[attachment]
	dir string
}

func storeAt(stateDir string) store {
	dir := filepath.Join(stateDir, "cni")
	return store{record.Dir[attachment]{Path: filepath.Join(dir, "attachments")}, dir}
}

func (s store) ipam() ipam.Store { return ipam.At(filepath.Join(s.dir, "addresses")) }

// find is the record of an attachment; false: there is none.
func (s store) find(a attachment) (attachment, bool, error) {
	r, err := s.Read(a.file())
	if errors.Is(err, fs.ErrNotExist) {
		return a, false, nil
	}
	return r, err == nil, err
}

// claim makes the record of a new attachment, by's. left is what a killed ADD
// left under the same name: it must be undone first, and a written then.
func (s store) claim(a *attachment, by worker) (left *attachment, err error) {
	a.Maker, a.Agent = by.maker, by.agent != nil
	err = s.Locked(func() error {
		if err := by.wanted(); err != nil {
			return err
		}
		old, found, err := s.find(*a)
		switch {
		case err != nil:
			return err
		case !found:
			return s.Write(a.file(), *a)
		case old.State == stateReady:
			return codedf(errExists, "container %s has an interface %s on network %s already: DEL it first", a.ContainerID, a.IfName, old.Network)
		}
		if err := by.free(old); err != nil {
			return err
		}
		old.Maker = by.maker
		left = &old
		return s.Write(old.file(), old)
	})
	return left, err
}

// condemn takes an attachment for removal: whoever dies from here on leaves
// half an attachment, which the next DEL or GC goes on with.
func (s store) condemn(a attachment, by worker) (r attachment, found bool, err error) {
	return s.condemnIf(a, by, func(attachment) bool { return true })
}

// condemnIf is condemn for one that chosen, with the records locked, wants; another is not found.
func (s store) condemnIf(a attachment, by worker, chosen func(attachment) bool) (r attachment, found bool, err error) {
	err = s.Locked(func() error {
		if err := by.wanted(); err != nil {
			return err
		}
		if r, found, err = s.find(a); err != nil || !found {
			return err
		}
		if found = chosen(r); !found {
			return nil
		}
		if r.State != stateReady {
			if err := by.free(r); err != nil {
				return err
			}
		}
		// What an agent began stays marked so until it is known to have ended.
		r.State, r.Maker, r.Agent = stateMaking, by.maker, r.Agent || by.agent != nil
		return s.Write(r.file(), r)
	})
	return r, found, err
}

// wanted says, with the records locked, that somebody waits for the call's end:
// nothing is begun for a process that was killed, for its DEL may have been.
func (w worker) wanted() error {
	if w.agent == nil {
		return nil
	}
	return w.agent.wanted()
}

// free says that nobody works on a, which is half made or half gone.
func (w worker) free(a attachment) error {
	switch {
	case w.agent == nil && a.Maker.AliveElsewhere():
		return busy(a)
	case w.agent != nil && !a.Agent:
		return errYours // in a container, an agent cannot see whether its maker lives
	}
	return nil // an agent does one call of an attachment at a time
}

func busy(a attachment) error {
	return codedf(types.ErrTryAgainLater, "container %s, interface %s: process %d works on it; try again when it has ended", a.ContainerID, a.IfName, a.Maker.PID)
}
