// SPDX-License-Identifier: Apache-2.0

package pairs

// Pods that hang on the wire between the nodes themselves: macvlan and ipvlan, by the
// kernel alone, or with mustang put on the pod's interface afterwards, as a chained
// plugin does.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
)

// OnWire is a contestant with such pods.
type OnWire struct {
	Common
	Label string
	Lab   string
	Kind  string        // macvlan or ipvlan
	By    lab.ServiceBy // none, or mustang's
}

// Name implements run.Contestant.
func (o OnWire) Name() string { return o.Label }

// wirePod is a pod that no tool of ours made.
type wirePod struct {
	ns     *os.File
	v4, v6 netip.Prefix
}

func (w wirePod) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.ns.Fd()) }

// Up implements run.Contestant.
func (o OnWire) Up(ctx context.Context, cgroup string) (_ run.Env, err error) {
	l, err := lab.New(ctx, lab.Config{Name: o.Lab, Nodes: 2, Mode: lab.Veth, Services: o.By, MTU: o.MTU, Binary: o.Binary, CgroupRoot: cgroup})
	if err != nil {
		return nil, err
	}
	e := &env{lab: l}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	var pods []wirePod
	for i, n := range l.Nodes() {
		p, err := o.pod(n, i)
		if p.ns != nil {
			e.extra = append(e.extra, p.ns)
		}
		if err != nil {
			return nil, err
		}
		pods = append(pods, p)
	}
	p := Pair{Common: o.Common, Label: o.Label, By: o.By}
	space := func(i int) *lab.Space { return &lab.Space{NetNS: pods[i].path(), Cgroup: l.Nodes()[i].Cgroup} }
	client, server := space(0), space(1)
	e.add(p, report.PodIP, p.target(client, server, pods[1].v4.Addr(), pods[1].v6.Addr(), podPort))
	if o.By != lab.NoServices {
		first := l.Nodes()[0]
		if _, err := first.Mustang(ctx, "ep", "add", "--ifname=eth0", "--netns="+pods[0].path(), "--in-pod", "--service-path=both"); err != nil {
			return nil, err
		}
		t := p.target(client, server, pods[1].v4.Addr(), pods[1].v6.Addr(), backendPort)
		if err := p.service(ctx, first, &t); err != nil {
			return nil, err
		}
		e.add(p, report.ClusterIP, t)
		if out, err := l.Mustang(ctx, "status", "-o", "json"); err == nil && json.Valid(out) {
			e.programs = out
		}
	}
	for i := range e.paths {
		e.paths[i].Subject.Mode = o.Kind
	}
	return e, nil
}

// pod makes a sub-interface of the node's wire, in a namespace of its own.
func (o OnWire) pod(n *lab.Node, i int) (w wirePod, err error) {
	if w.ns, err = run.NewNetNS(0); err != nil {
		return w, err
	}
	host := func(p netip.Prefix, last byte) netip.Prefix {
		b := p.Addr().AsSlice()
		b[len(b)-1], b[len(b)-2] = last, 1
		a, _ := netip.AddrFromSlice(b)
		return netip.PrefixFrom(a, p.Bits())
	}
	w.v4, w.v6 = host(lab.NodesCIDR4, byte(10+i)), host(lab.NodesCIDR6, byte(10+i))
	if err := n.Do(func() error { return o.subInterface(int(w.ns.Fd())) }); err != nil {
		return w, err
	}
	space := lab.Space{NetNS: w.path()}
	return w, space.Do(func() error {
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return fmt.Errorf("look up eth0: %w", err)
		}
		for _, p := range []netip.Prefix{w.v4, w.v6} {
			a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
			if p.Addr().Is6() {
				a.Flags = unix.IFA_F_NODAD
			}
			if err := netlink.AddrAdd(eth, a); err != nil {
				return fmt.Errorf("add %s: %w", p, err)
			}
		}
		if err := netlink.LinkSetUp(eth); err != nil {
			return fmt.Errorf("set eth0 up: %w", err)
		}
		// Everything is on the wire, also what is not: a Service's address has to leave.
		for _, dst := range []string{"0.0.0.0/0", "::/0"} {
			_, all, _ := net.ParseCIDR(dst)
			if err := netlink.RouteReplace(&netlink.Route{LinkIndex: eth.Attrs().Index, Dst: all, Scope: netlink.SCOPE_LINK}); err != nil {
				return fmt.Errorf("add the default route: %w", err)
			}
		}
		return nil
	})
}

// subInterface makes it in the current namespace, the node's.
func (o OnWire) subInterface(ns int) error {
	parent, err := netlink.LinkByName(lab.Wire)
	if err != nil {
		return fmt.Errorf("look up %s: %w", lab.Wire, err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.Namespace, attrs.MTU = "eth0", parent.Attrs().Index, netlink.NsFd(ns), o.MTU
	var link netlink.Link = &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}
	if o.Kind == "ipvlan" {
		link = &netlink.IPVlan{LinkAttrs: attrs, Mode: netlink.IPVLAN_MODE_L2}
	}
	err = netlink.LinkAdd(link)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("this kernel has no %s (%w)", o.Kind, errors.ErrUnsupported)
	}
	if err != nil {
		return fmt.Errorf("create %s on %s: %w", o.Kind, lab.Wire, err)
	}
	return nil
}
