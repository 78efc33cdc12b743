// SPDX-License-Identifier: Apache-2.0

package cni

// What an uninstall removes of the plugin's: attachments, and what they shared.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/masquerade"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/record"
)

// Attached names the attachments of a scope: a pod where the runtime has told
// its name, else the container.
func Attached(scope engine.Scope) (names []string, err error) {
	all, err := storeAt(scope.StateDir).List()
	for _, a := range all {
		name := a.ContainerID
		if args := cniArgs(a.Args); args["K8S_POD_NAME"] != "" {
			name = args["K8S_POD_NAMESPACE"] + "/" + args["K8S_POD_NAME"]
		}
		names = append(names, fmt.Sprintf("%s (%s)", name, a.IfName))
	}
	return names, err
}

// Uninstall takes every container off the network, and removes what attachments
// shared: bridges, shims, masquerade, records. It can be done again at any point
// of itself. The engine's things stay for Reset. Other IPAM plugins are in
// plugins, as in CNI_PATH.
func Uninstall(ctx context.Context, scope engine.Scope, plugins string) error {
	s := storeAt(scope.StateDir)
	all, err := s.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range all {
		p := &plugin{store: s, ctx: ctx, tell: toStderr, by: worker{maker: record.ThisMaker()}, leaves: true,
			env: call{command: "GC", containerID: a.ContainerID, netns: a.NetNS, ifname: a.IfName, path: plugins}}
		if p.Config, err = configOf(a, scope); err == nil {
			err = p.collect(a)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", a.key(), err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err // the records say what is left to do
	}
	errs = append(errs, deleteShared(), masquerade.TableFor(scope.StateDir, engine.DefaultStateDir).Delete(), os.RemoveAll(s.dir))
	if err := os.Remove(SocketPath(scope.StateDir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// configOf is the configuration that an attachment was made with, or as much as
// is needed to remove it.
func configOf(a attachment, scope engine.Scope) (*Config, error) {
	if len(a.Config) == 0 {
		a.Config = json.RawMessage(`{}`)
	}
	c, err := Parse(a.Config, nil)
	if err == nil {
		c.Name, c.BPFFS, c.StateDir, c.CgroupRoot = a.Network, scope.BPFFS, scope.StateDir, scope.CgroupRoot
	}
	return c, err
}

// deleteShared deletes the links that pods shared, but a bridge that has
// somebody's ports.
func deleteShared() error {
	shared, err := link.Shared()
	if err != nil {
		return fmt.Errorf("look for what pods shared: %w", err)
	}
	links, err := netns.Links()
	if err != nil {
		return fmt.Errorf("list the ports of bridges: %w", err)
	}
	var errs []error
	for _, l := range shared {
		name := l.Attrs().Name
		i := slices.IndexFunc(links, func(port netlink.Link) bool { return port.Attrs().MasterIndex == l.Attrs().Index })
		if i >= 0 {
			errs = append(errs, fmt.Errorf("%s has a port that is not mustang's, %s: remove that, and then the bridge", name, links[i].Attrs().Name))
			continue
		}
		if err := netlink.LinkDel(l); err != nil {
			errs = append(errs, fmt.Errorf("delete %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
