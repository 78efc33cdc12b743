// SPDX-License-Identifier: Apache-2.0

package cni

// Own pools beside pods that have addresses of them without having got them here: another
// network's, that ran before the list was there, adopted or not; the command line's; and
// mustang's own, where the state directory was lost.

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/ipam"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
	records "github.com/mustang-net/mustang/internal/store"
)

// strangerPrefix is of such an owner among the allocations; the namespace's path follows. No
// network's name has a colon.
const strangerPrefix = "netns:"

// LookAgain has the next ADD look anew for pods that have addresses of its pools: some may
// have come that got them elsewhere, or gone.
func LookAgain(scope engine.Scope) error {
	return storeAt(scope.StateDir).ipam().LookAgain(func(owner string) bool { return strings.HasPrefix(owner, strangerPrefix) })
}

// take reserves what strangers have, and gives owner addresses.
func (p *plugin) take(owner string, want []netip.Addr) (list []ipam.Allocation, err error) {
	err = p.withoutDead(func() error {
		list, err = p.store.ipam().Allocate(owner, p.IPAM.Pools, want, p.strangers)
		return err
	})
	return list, err
}

// room says whether take could serve one more pod.
func (p *plugin) room() error {
	return p.withoutDead(func() error { return p.store.ipam().Room(p.IPAM.Pools) })
}

// strangers are the addresses of endpoints, and of the interfaces that connect pods to this
// node whose namespaces are beside this one's or where people keep theirs. An agent that
// does not see where the runtime keeps them leaves that to the plugin.
func (p *plugin) strangers() (map[netip.Addr]string, error) {
	if p.by.agent != nil && !p.sees(p.env.netns) {
		return nil, errYours
	}
	out := map[netip.Addr]string{}
	endpoints, err := records.At(p.StateDir).LookEndpoints()
	for _, ep := range endpoints {
		for _, a := range ep.Addrs() {
			out[a] = strangerPrefix + ep.Netns
		}
	}
	var dirs []string
	for _, dir := range []string{netns.Dir, filepath.Dir(p.env.netns)} {
		if dir, err := filepath.EvalSymlinks(dir); err == nil && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	for _, dir := range dirs {
		paths, _ := filepath.Glob(filepath.Join(dir, "*"))
		for _, path := range paths {
			for _, a := range engine.AddrsAt(path, link.DefaultIfName) {
				out[a] = strangerPrefix + path
			}
		}
	}
	return out, err
}

// sees says whether the directory of a namespace's path is there for this process. An
// agent, in its container, has a /proc of its own.
func (p *plugin) sees(path string) bool {
	if strings.HasPrefix(path, "/proc/") {
		return p.by.agent == nil
	}
	_, err := os.Stat(filepath.Dir(path))
	return err == nil
}

// isGone says that an owner is a stranger whose namespace is gone.
func (p *plugin) isGone(owner string) bool {
	path, is := strings.CutPrefix(owner, strangerPrefix)
	if !is || p.by.agent != nil && !p.sees(path) {
		return false
	}
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}
