// SPDX-License-Identifier: Apache-2.0

package engine

// Endpoints as somebody knows them who did not keep their ids, or kept one
// that may be another's by now; and what is wrong with one.

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// Whereabouts describe an endpoint; what is zero is not known.
type Whereabouts struct {
	ID          uint32
	Netns       string // path of the pod's network namespace
	IfName      string // inside it
	HostIfIndex int    // the host's end, when that can only be this endpoint's
	Owner       state.Owner
	// For RemoveAt, of an endpoint there without this ID: Living ones go, too, not
	// only those whose interfaces are gone; or none, for the place is Shared.
	Living, Shared bool
}

// at says that ep is where w says.
func (w Whereabouts) at(ep state.Endpoint) bool {
	return ep.Owner == w.Owner && w.Netns != "" && ep.Netns == w.Netns && ep.IfName == w.IfName
}

// hostEnd says that ep has the host's end that w names.
func (w Whereabouts) hostEnd(ep state.Endpoint) bool {
	return ep.Owner == w.Owner && w.HostIfIndex != 0 && ep.Placement == state.HostEnd && ep.IfIndex == w.HostIfIndex
}

// EndpointOf is the id of the endpoint that w describes.
func (e *Engine) EndpointOf(w Whereabouts) (uint32, error) {
	if err := e.loadEndpoints(); err != nil {
		return 0, err
	}
	if ep, ok := e.known[w.ID]; ok && w.at(ep) {
		return w.ID, nil
	}
	// A path may have led to a pod that is gone before it led to this one.
	return e.pick(func(ep state.Endpoint) bool {
		return w.at(ep) || w.hostEnd(ep)
	}, w.IfName, w.Netns)
}

// RemoveAt is RemovePod for the endpoint that w describes, and for those of
// pods that are gone which were in the same place; absent is success. A place is
// no name: a living endpoint there may be another's, who came later.
func (e *Engine) RemoveAt(w Whereabouts) error {
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	var errs []error
	for id, ep := range e.known {
		if w.hostEnd(ep) || w.at(ep) && (id == w.ID || !w.Shared && (w.Living || !e.alive(ep))) {
			errs = append(errs, e.RemovePod(id))
		}
	}
	return errors.Join(errs...)
}

// pick is the endpoint that wanted chooses, the living one of several.
func (e *Engine) pick(wanted func(state.Endpoint) bool, ifname, path string) (uint32, error) {
	var found []state.Endpoint
	for _, ep := range e.known {
		if wanted(ep) {
			found = append(found, ep)
		}
	}
	for _, ep := range found {
		if len(found) == 1 || e.alive(ep) {
			return ep.ID, nil
		}
	}
	if len(found) > 0 {
		return found[0].ID, nil
	}
	return 0, fmt.Errorf("endpoint of %s in %s: %w; `mustang ep ls` lists those that exist", ifname, path, ErrNotFound)
}

// Dead are the owner's endpoints whose interfaces are gone.
func (e *Engine) Dead(owner state.Owner) ([]state.Endpoint, error) {
	if err := e.loadEndpoints(); err != nil {
		return nil, err
	}
	var out []state.Endpoint
	for _, ep := range e.known {
		if ep.Owner != owner {
			continue
		}
		dead := !e.alive(ep) && unseen(ep) == ""
		// What is attached still knows, where the record is lost, or the path does not tell: a pod that is there may have
		// renamed its interface, and be another process's, of which this one has no /proc, or a mount that it has not.
		if ep.Netns == "" && ep.Attach != datapath.AttachClsact || dead && !isAbsent(ep.Netns) {
			attached, err := e.holds(ep)
			dead = err == nil && !attached
		}
		if dead {
			out = append(out, ep)
		}
	}
	return out, nil
}

// isAbsent says that a namespace's path, or what it is a link to, is not in its directory,
// which is there.
func isAbsent(path string) bool {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	if to, err := os.Readlink(path); err == nil {
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(path), to)
		}
		path = to
	}
	_, err := os.Stat(filepath.Dir(path))
	return err == nil
}

// holds says whether the programs of ep are attached. A link says it anywhere; a filter,
// where its interface is, and nobody who cannot look there.
func (e *Engine) holds(ep state.Endpoint) (attached bool, err error) {
	if ep.Attach != datapath.AttachClsact {
		return e.dp.Attached(ep)
	}
	if ep.Placement == state.InPod && !netns.Is(ep.Netns) {
		return false, fmt.Errorf("endpoint %d: its network namespace %s cannot be opened from here", ep.ID, ep.Netns)
	}
	err = e.atHook(ep, func() (err error) {
		attached, err = e.dp.Attached(ep)
		return err
	})
	return attached, err
}

// CheckEndpoint looks at everything of an endpoint, and answers each fault by
// an error of its own, joined.
func (e *Engine) CheckEndpoint(id uint32) error {
	if err := e.loadEndpoints(); err != nil {
		return err
	}
	ep, ok := e.known[id]
	if !ok {
		return fmt.Errorf("endpoint %d is not in the tables", id)
	}
	var errs []error
	for _, a := range ep.Addrs() {
		got, ok, err := e.dp.Addrs.Get(datapath.FromAddr(a))
		if err != nil {
			return err
		}
		if !ok || got != id {
			errs = append(errs, fmt.Errorf("address %s does not lead to endpoint %d in the tables", a, id))
		}
	}
	if _, ok, err := e.dp.Netns.Get(ep.NetnsCookie); err != nil || !ok {
		errs = append(errs, err, fmt.Errorf("the namespace of endpoint %d is not in the tables: its sockets get no Services", id))
	}
	errs = append(errs, e.checkMasquerade(ep))
	if !e.alive(ep) {
		return errors.Join(append(errs, fmt.Errorf("interface %s of endpoint %d is gone or was replaced", ep.IfName, id))...)
	}
	errs = append(errs, e.checkMAC(ep))
	attached := false
	err := e.atHook(ep, func() (err error) {
		attached, err = e.dp.Attached(ep)
		return err
	})
	if err == nil && !attached {
		err = fmt.Errorf("the programs of endpoint %d are not attached to its interface", id)
	}
	return errors.Join(append(errs, err, e.dp.CheckPrograms(ep))...)
}

// checkMAC wants the pod's interface to have the link address that its programs
// let send: somebody may have given it another since.
func (e *Engine) checkMAC(ep state.Endpoint) error {
	return e.inPod(ep, func() error {
		l, err := netlink.LinkByIndex(ep.PodIndex)
		if err != nil {
			return err
		}
		if mac := linkAddress(l); !bytes.Equal(mac, ep.MAC) {
			return fmt.Errorf("interface %s of endpoint %d has MAC address %s, and its programs drop what does not come from %s", ep.IfName, ep.ID, mac, ep.MAC)
		}
		return nil
	})
}

// Ready says whether AddEndpoint could work, without changing anything.
func Ready(scope Scope) error {
	scope = scope.withDefaults()
	if err := scope.checkBPFFS(); err != nil {
		return privilege(err)
	}
	return nil
}

// CgroupRoot is the directory whose sockets get Services.
func (s Scope) Cgroup() (string, error) { return s.cgroupRoot() }

// Stranger is a connected pod that is not an endpoint.
type Stranger struct {
	Netns  string   `json:"netns"`
	IfName string   `json:"ifname"`
	Addrs  []string `json:"addresses"`
}

// Strangers looks for ifname in the named namespaces, and answers those that
// have it with a global address and are not endpoints.
func (e *Engine) Strangers(paths []string, ifname string) ([]Stranger, error) {
	if err := e.loadEndpoints(); err != nil {
		return nil, err
	}
	home, err := netns.Cookie()
	if err != nil {
		return nil, err
	}
	var out []Stranger
	for _, path := range paths {
		ep := state.Endpoint{Netns: path, IfName: ifname}
		err := netns.Do(path, func() error {
			_, err := examine(&ep)
			return err
		})
		if err != nil || ep.NetnsCookie == home || e.isEndpoint(ep) {
			continue
		}
		s := Stranger{Netns: path, IfName: ifname}
		for _, a := range ep.Addrs() {
			s.Addrs = append(s.Addrs, a.String())
		}
		out = append(out, s)
	}
	return out, nil
}

// AddrsAt are the addresses of an interface that connects a pod to this node; none: there is
// no such pod.
func AddrsAt(path, ifname string) []netip.Addr {
	ep, err := discover(EndpointSpec{Netns: path, IfName: ifname})
	if err != nil {
		return nil
	}
	return ep.Addrs()
}

func (e *Engine) isEndpoint(ep state.Endpoint) bool {
	for _, k := range e.known {
		if k.NetnsCookie == ep.NetnsCookie && (k.PodIndex == ep.PodIndex || k.PodIndex == 0) {
			return true
		}
	}
	return false
}
