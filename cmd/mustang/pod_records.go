// SPDX-License-Identifier: Apache-2.0

package main

// The records of made pods: one small file a pod, written before the pod is
// made, so that a later process finds and finishes or undoes what an earlier
// one began.

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/link"
)

const (
	podMaking = "making"
	podReady  = "ready"
)

// podRecord is what is known of one pod.
type podRecord struct {
	Name       string       `json:"name"`
	State      string       `json:"state"`
	Maker      podMaker     `json:"maker"`
	Mode       string       `json:"mode"`
	IPv4       netip.Prefix `json:"ipv4,omitzero"`
	IPv6       netip.Prefix `json:"ipv6,omitzero"`
	NetNS      string       `json:"netns"`
	OwnNetNS   bool         `json:"ownNetns"` // made by pod add, removed by pod rm
	IfName     string       `json:"ifname"`
	HostIfName string       `json:"hostIfname"`
	Datapath   string       `json:"datapath"` // "plain" or the service path
	LocalMTU   int          `json:"localMtu,omitzero"`
	BigTCP4    int          `json:"bigTcpIpv4,omitzero"`
	BigTCP6    int          `json:"bigTcpIpv6,omitzero"`
}

// podMaker is the process that wrote the record. A process id alone comes
// around again; with the start time it does not.
type podMaker struct {
	PID   int    `json:"pid"`
	Start string `json:"start"`
}

func thisMaker() podMaker {
	pid := os.Getpid()
	return podMaker{pid, processStart(pid)}
}

func (m podMaker) alive() bool {
	start := processStart(m.PID)
	return start != "" && start == m.Start
}

// processStart is field 22 of /proc/PID/stat, in clock ticks since boot, or ""
// when the process is gone or only waits to be reaped.
func processStart(pid int) string {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The command's name, in parentheses, may hold anything.
	f := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return ""
	}
	return f[19]
}

// linkSpec is enough of a link.Spec to delete the connection.
func (r podRecord) linkSpec() link.Spec {
	s := link.Spec{Name: r.Name, Mode: r.Mode, NetNS: r.NetNS, IfName: r.IfName, HostIfName: link.HostName(r.Name)}
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
type podStore struct{ dir string }

func newPodStore(stateDir string) podStore { return podStore{filepath.Join(stateDir, "pods")} }

func (s podStore) file(name string) string { return filepath.Join(s.dir, name+".json") }

func (s podStore) tmp(name string) string { return filepath.Join(s.dir, "."+name+".tmp") }

// list returns all records by name. No directory is no records.
func (s podStore) list() ([]podRecord, error) {
	files, err := filepath.Glob(filepath.Join(s.dir, "*.json"))
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	out := []podRecord{}
	for _, f := range files {
		r, err := readRecord(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

func readRecord(file string) (podRecord, error) {
	var r podRecord
	raw, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(raw, &r)
	}
	if err != nil {
		return r, fmt.Errorf("read pod record %s: %w", file, err)
	}
	return r, nil
}

// write replaces a record in one step: a reader, and a machine that loses
// power, see the old one or the new one.
func (s podStore) write(r podRecord) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write record of pod %s: %w", r.Name, err)
		}
	}()
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	// One name at a time has one writer, so a killed one's file is overwritten.
	f, err := os.OpenFile(s.tmp(r.Name), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // after the rename there is nothing to remove
	_, err = f.Write(append(raw, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), s.file(r.Name)); err != nil {
		return err
	}
	d, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (s podStore) forget(name string) error {
	for _, f := range []string{s.tmp(name), s.file(name)} {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove record of pod %s: %w", name, err)
		}
	}
	return nil
}

// locked runs fn while no other process changes records. It is held for a few
// file operations, never while a pod is being made.
func (s podStore) locked(fn func() error) error {
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return fmt.Errorf("create pod records: %w", err)
	}
	d, err := os.Open(s.dir)
	if err != nil {
		return fmt.Errorf("open pod records: %w", err)
	}
	defer d.Close() // and with it the lock
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock pod records %s: %w", s.dir, err)
	}
	return fn()
}

// claim takes the name of r and its addresses, by a record in state "making".
// When a killed process left a record under that name, claim takes that one
// over and returns it: it must be undone before r is written.
func (s podStore) claim(r podRecord) (left *podRecord, err error) {
	err = s.locked(func() error {
		all, err := s.list()
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
	case r.Maker != thisMaker() && r.Maker.alive():
		return fmt.Errorf("name: pod %s is being worked on by process %d: wait for it", r.Name, r.Maker.PID)
	}
	return nil
}
