// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
)

// status fails with 50 when ADD could not work, and with 51 when pods that run
// suffer from the same.
func (p *plugin) status() error {
	if err := p.Validate(); err != nil {
		return err
	}
	if err := p.supported(); err != nil {
		return p.unavailable(false, err)
	}
	for _, check := range []func() error{p.statusNode, p.statusUplink, p.statusIPAM} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

// statusNode asks whether an endpoint could be made.
func (p *plugin) statusNode() error {
	if err := engine.Ready(p.scope()); err != nil {
		return p.unavailable(true, err)
	}
	if p.ServicePath == "both" || p.ServicePath == "socket" {
		root, err := p.scope().Cgroup()
		if err != nil {
			return p.unavailable(false, err)
		}
		var st unix.Statfs_t
		if err := unix.Statfs(root, &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
			return p.unavailable(false, fmt.Errorf("cgroupRoot %s is not a directory of a cgroup2 file system", root))
		}
	}
	if err := writable(p.StateDir); err != nil {
		return p.unavailable(false, err)
	}
	_, err := p.node(request{Op: opStatus})
	switch {
	case errors.Is(err, errNoAgent):
		return p.unavailable(false, fmt.Errorf("requireAgent is set, and no agent listens on %s: start it", SocketPath(p.StateDir)))
	case errors.Is(err, engine.ErrHeld):
		return p.unavailable(false, err) // pods that run keep what they have
	case err != nil:
		return p.unavailable(true, err)
	}
	return nil
}

// unavailable is 51 when running pods suffer and there are any.
func (p *plugin) unavailable(suffer bool, err error) error {
	if suffer {
		if pods, listErr := p.store.List(); listErr == nil && len(pods) > 0 {
			return types.NewError(errUnavailableLimited, "ADD would fail, and running pods may be affected", err.Error())
		}
	}
	return types.NewError(errUnavailable, "ADD would fail", err.Error())
}

// writable says whether dir, or the nearest above it, takes new files.
func writable(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the state directory: %w", err)
	}
	// Without a name: who is killed leaves nothing, which would be in the way of an uninstall.
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		err = unix.Access(dir, unix.W_OK)
	case err == nil:
		err = unix.Close(fd)
	}
	if err != nil {
		return fmt.Errorf("write to the state directory %s: %w", dir, err)
	}
	return nil
}

func (p *plugin) statusUplink() error {
	if !link.NeedsUplink(p.Mode) && p.Uplink == "" {
		return nil
	}
	all, err := p.uplinks()
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("mode %s needs the node's interface to the network, and there is no default route: name it by uplink", p.Mode)
	}
	if err != nil {
		return p.unavailable(p.Mode != link.HostDevice, err) // a pod that has the device has all it needs
	}
	if l := all[0]; l.Attrs().Flags&net.FlagUp == 0 && p.Mode != link.HostDevice {
		return p.unavailable(true, fmt.Errorf("uplink %s is down", l.Attrs().Name))
	}
	return nil
}

func (p *plugin) statusIPAM() error {
	switch {
	case p.Mode == Chained:
		return nil
	case p.IPAM.Type == OwnIPAM:
		if err := p.room(); err != nil {
			return p.unavailable(false, err)
		}
		return nil
	}
	if _, err := delegate(p.IPAM.Type, p.raw, p.env); err != nil {
		return p.unavailable(false, fmt.Errorf("IPAM plugin %s: %w", p.IPAM.Type, err))
	}
	if leases(p.IPAM.Type) {
		return p.statusDaemon()
	}
	return nil
}

// statusDaemon asks for the dhcp plugin's daemon, for the plugin itself does not
// know STATUS.
func (p *plugin) statusDaemon() error {
	socket := p.IPAM.DaemonSocket
	if socket == "" {
		socket = "/run/cni/dhcp.sock"
	}
	c, err := net.Dial("unix", socket)
	if err != nil {
		return p.unavailable(false, fmt.Errorf("IPAM plugin dhcp: its daemon does not answer: %w; start `dhcp daemon`", err))
	}
	return c.Close()
}
