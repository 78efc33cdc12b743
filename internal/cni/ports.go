// SPDX-License-Identifier: Apache-2.0

package cni

// Host ports: the capability portMappings. Who declares a capability in the
// list gets its arguments, and does it; mustang's way are frontends in the
// tables of Services, of owner cni, made with the endpoint and gone with it.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/state"
)

// PortMapping is a port of the node that leads to one of the pod (CNI's
// CONVENTIONS.md, "portMappings").
type PortMapping struct {
	HostPort      uint16         `json:"hostPort"`
	ContainerPort uint16         `json:"containerPort"`
	Protocol      state.Protocol `json:"protocol"`
	HostIP        string         `json:"hostIP,omitempty"` // "": each of the node's addresses
}

// UnmarshalJSON takes a protocol's name as Kubernetes writes it too, in capitals, and none.
func (m *PortMapping) UnmarshalJSON(text []byte) error {
	type plain PortMapping
	given := struct {
		*plain
		Protocol string `json:"protocol"`
	}{plain: (*plain)(m)}
	if err := json.Unmarshal(text, &given); err != nil || given.Protocol == "" {
		return err
	}
	return m.Protocol.UnmarshalText([]byte(strings.ToLower(given.Protocol)))
}

// validatePorts refuses what is no mapping, and two of one port.
func (c *Config) validatePorts() error {
	const field = "runtimeConfig.portMappings"
	type place struct {
		protocol state.Protocol
		host     netip.Addr
		port     uint16
	}
	seen := make(map[place]bool)
	for i := range c.RuntimeConfig.PortMappings {
		m := &c.RuntimeConfig.PortMappings[i]
		if m.Protocol == 0 {
			m.Protocol = state.TCP
		}
		if m.HostPort == 0 || m.ContainerPort == 0 {
			return invalid(field, "hostPort %d to containerPort %d: give both, each 1 to 65535", m.HostPort, m.ContainerPort)
		}
		if m.HostIP != "" {
			if a, err := netip.ParseAddr(m.HostIP); err != nil || a.Zone() != "" {
				return invalid(field, "hostIP %q is not an address", m.HostIP)
			}
		}
		for _, host := range m.hosts() {
			key := place{m.Protocol, host, m.HostPort}
			if seen[key] {
				return invalid(field, "hostPort %d is given twice: give it once", m.HostPort)
			}
			seen[key] = true
		}
	}
	return nil
}

// hosts are the addresses that a mapping is of: unspecified for all of a family.
func (m PortMapping) hosts() []netip.Addr {
	if host, err := netip.ParseAddr(m.HostIP); err == nil {
		return []netip.Addr{host.Unmap()}
	}
	return []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
}

// hostPorts are the mappings for a pod's addresses. One of a node's address is
// for the pod's address of its family; one of all is also the loopback's, unless
// that has its own.
func hostPorts(list []PortMapping, pod []netip.Addr) (out []engine.HostPort) {
	for _, m := range list {
		for _, host := range m.hosts() {
			for _, a := range pod {
				if host.Is4() != a.Is4() {
					continue
				}
				p := engine.HostPort{Protocol: m.Protocol, HostIP: host, HostPort: m.HostPort, Pod: netip.AddrPortFrom(a, m.ContainerPort)}
				out = append(out, p)
				own := slices.ContainsFunc(list, func(o PortMapping) bool {
					return o.Protocol == m.Protocol && o.HostPort == m.HostPort && slices.Contains(o.hosts(), loopback(a))
				})
				if host.IsUnspecified() && !own {
					p.HostIP = loopback(a)
					out = append(out, p)
				}
			}
		}
	}
	return out
}

// loopback is the address of a's family by which the node calls itself.
func loopback(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// addEndpoint makes the endpoint with its host ports, or neither.
func (r request) addEndpoint(ctx context.Context, e *engine.Engine) (state.Endpoint, error) {
	ep, err := e.AddEndpoint(ctx, r.Spec)
	if err != nil || len(r.Ports) == 0 {
		return ep, err
	}
	// Ones that a pod left whose DEL never came are nobody's.
	if err = e.SweepHostPorts(); err == nil {
		err = e.AddHostPorts(hostPorts(r.Ports, ep.Addrs())...)
	}
	if err != nil {
		err = errors.Join(err, e.RemovePod(ep.ID))
	}
	if errors.Is(err, engine.ErrPortTaken) {
		err = coded(errPortTaken, err)
	}
	return ep, err
}

// openEdge lets clients outside, and the node itself, use host ports: where no
// agent looks after it, and nobody has set it.
func (p *plugin) openEdge(e *engine.Engine) error {
	now, err := e.Edge()
	if err != nil || len(now.Devices) > 0 || now.Host {
		return err
	}
	c := *p.Config
	if c.Mode == link.HostDevice {
		c.Uplink = "" // that one is the pod's
	}
	uplinks, err := c.uplinks()
	if err != nil {
		return err
	}
	want := engine.Edge{Host: true}
	for _, l := range uplinks {
		want.Devices = append(want.Devices, l.Attrs().Name)
	}
	if err := e.SetEdge(want); err != nil {
		return fmt.Errorf("open the node's host ports: %w", err)
	}
	return nil
}

// checkPorts names host ports that do not lead to the pod.
func (r request) checkPorts(e *engine.Engine, id uint32) error {
	if len(r.Ports) == 0 {
		return nil
	}
	all, err := e.Endpoints()
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(ep state.Endpoint) bool { return ep.ID == id })
	if i < 0 {
		return nil
	}
	return e.CheckHostPorts(hostPorts(r.Ports, all[i].Addrs())...)
}
