// SPDX-License-Identifier: Apache-2.0

package main

// mustang pod: connect a network namespace to this node without Kubernetes.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/record"
	"github.com/mustang-net/mustang/internal/state"
)

// endpointAttacher puts the datapath on a pod's new link, which is not up yet,
// and takes it off again.
// Removing what is absent is success, also when the namespace is gone. Of an
// endpoint whose id is not known (0) only remains are removed: a living one in
// its place is another pod's. One that is also an io.Closer is closed after use.
type endpointAttacher interface {
	AddEndpoint(ctx context.Context, made state.Endpoint, pod podSpec) (id uint32, err error)
	RemoveEndpoint(ctx context.Context, id uint32, netnsPath, ifname string) error
}

// openAttacher is set by the datapath's part of the tool.
var openAttacher func(ctx context.Context, g *globals) (endpointAttacher, error)

const podPlain = "plain"

var (
	podNameOK    = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)
	servicePaths = []string{"both", "socket", "tc", "none"}
)

func newPodCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{Use: "pod", Short: "Connect pods to this node without Kubernetes"}
	cmd.AddCommand(newPodAddCmd(g), newPodRmCmd(g), newPodLsCmd(g))
	return cmd
}

// podFlags are pod add's, as given.
type podFlags struct {
	mode, ip, netns, uplink, bridge, gateway, mac string
	mtu                                           int
	plain                                         bool
	servicePath                                   string
	labels                                        podLabelFlags
	size                                          podSizeFlags
}

// meaningless refuses flags that mean nothing beside another.
func meaningless(cmd *cobra.Command, beside string, names []string) error {
	for _, name := range names {
		given := cmd.Flags().Lookup(name)
		if given.Changed && (given.Value.Type() != "bool" || given.Value.String() != given.DefValue) {
			return usagef("--%s has no meaning with --%s: drop one of them", name, beside)
		}
	}
	return nil
}

func newPodAddCmd(g *globals) *cobra.Command {
	var f podFlags
	cmd := &cobra.Command{
		Use:   "add NAME",
		Short: "Make a pod's interface and put the datapath on it",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.plain {
				if err := meaningless(cmd, "plain", []string{"service-path", "namespace", "labels", "ports", "masquerade"}); err != nil {
					return err
				}
			}
			return podAdd(cmd.Context(), g, args[0], f, cmd.ErrOrStderr())
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&f.mode, "mode", link.Veth, strings.Join(link.Modes, ", "))
	fl.StringVar(&f.ip, "ip", "", "the pod's address, or one of each family: A[/LEN][,B[/LEN]]; an address without length is alone with veth and netkit, else in a /24 (IPv6: /64)")
	fl.StringVar(&f.netns, "netns", "", "the pod's network namespace (default: one is made at "+netns.Dir+"/NAME)")
	fl.StringVar(&f.uplink, "uplink", "", "macvlan, ipvlan: the node's interface to build on; host-device: the one that is moved into the pod")
	fl.StringVar(&f.bridge, "bridge", link.DefaultBridge, "bridge: the node's bridge, made when absent")
	fl.StringVar(&f.gateway, "gateway", "", "the pod's next hop, or one of each family (default: veth and netkit: "+link.VethGateway4.String()+"; else the first address of the pod's prefix)")
	fl.StringVar(&f.mac, "mac", "", "the pod's MAC address (default: random)")
	fl.IntVar(&f.mtu, "mtu", 0, "bytes (default: the kernel's choice)")
	fl.BoolVar(&f.plain, "plain", false, "no eBPF: only the link")
	fl.StringVar(&f.servicePath, "service-path", "both", "where Services act on the pod: both, socket, tc or none")
	f.labels.register(fl)
	f.size.register(fl)
	refuseEmpty(fl)
	return cmd
}

func newPodRmCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "rm NAME",
		Short: "Remove a pod made by pod add",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return podRm(cmd.Context(), g, args[0], cmd.ErrOrStderr())
		},
	}
}

func newPodLsCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the pods made by pod add",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := newPodStore(g.StateDir).List()
			if err != nil {
				return err
			}
			return g.print(cmd.OutOrStdout(), all, func(w io.Writer) {
				row(w, "NAME", "MODE", "IP", "NETNS", "HOSTIF", "DATAPATH")
				for _, r := range all {
					datapath := r.Datapath
					if r.State != podReady {
						datapath = r.State
					}
					row(w, r.Name, r.Mode, strings.Join(r.ips(), ","), r.NetNS, r.HostIfName, datapath)
				}
			})
		},
	}
}

// podAdd validates everything before it changes anything.
func podAdd(ctx context.Context, g *globals, name string, f podFlags, warn io.Writer) (err error) {
	spec, err := f.spec(g, name)
	if err != nil {
		return usageError{err}
	}
	pod, err := f.labels.spec(name)
	if err != nil {
		return err
	}
	pod.servicePath = state.ServicePath(f.servicePath)
	att, done, err := attacherFor(ctx, g, f.plain)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()

	rec := podRecord{
		Name: name, State: podMaking, Maker: record.ThisMaker(), Mode: spec.Mode,
		IPv4: spec.IPv4, IPv6: spec.IPv6, NetNS: spec.NetNS, OwnNetNS: f.netns == "" && !netns.Is(spec.NetNS),
		IfName: spec.IfName, HostIfName: spec.HostIfName, Uplink: spec.Uplink, Datapath: f.servicePath,
	}
	if f.plain {
		rec.Datapath = podPlain
	}
	switch {
	case link.HasShim(spec.Mode):
		rec.HostIfName = link.ShimName(spec.Mode, spec.Uplink)
	case spec.Mode == link.HostDevice:
		rec.HostIfName = spec.Uplink
	}
	store := newPodStore(g.StateDir)
	left, err := store.claim(rec)
	if err != nil {
		return err
	}
	if left != nil {
		if err := podUndo(ctx, g, att, *left); err != nil {
			return fmt.Errorf("clean up what an interrupted `pod add %s` left: %w", name, err)
		}
		// The namespace that looked like a user's may have been the killed one's.
		rec.OwnNetNS = f.netns == "" && !netns.Is(spec.NetNS)
		if err := store.write(rec); err != nil {
			return err
		}
	}
	res, err := podMake(ctx, g, att, spec, &rec, pod)
	if err != nil {
		if rec.Endpoint == 0 { // the addresses may be another's, who keeps what leads to them
			rec.IPv4, rec.IPv6 = netip.Prefix{}, netip.Prefix{}
		}
		if undoErr := podUndo(ctx, g, att, rec); undoErr != nil {
			return errors.Join(err, undoErr) // the record stays, for pod rm
		}
		return errors.Join(err, store.forget(name))
	}
	for _, note := range res.BigTCP.Notes {
		fmt.Fprintln(warn, note)
	}
	rec.State, rec.LocalMTU = podReady, spec.LocalMTU
	rec.BigTCP4, rec.BigTCP6 = res.BigTCP.IPv4, res.BigTCP.IPv6
	return errors.Join(store.write(rec), cni.LookAgain(g.scope())) // its addresses may be in the plugin's pools
}

func podMake(ctx context.Context, g *globals, att endpointAttacher, spec link.Spec, rec *podRecord, pod podSpec) (link.Result, error) {
	if rec.OwnNetNS {
		if err := netns.Create(rec.NetNS); err != nil {
			return link.Result{}, err
		}
	}
	if att != nil {
		spec.Attach = func(made state.Endpoint) (err error) {
			rec.Endpoint, err = att.AddEndpoint(ctx, made, pod)
			return err
		}
	}
	spec.Taking = func(was link.Device) error {
		rec.Device = &was
		return newPodStore(g.StateDir).write(*rec)
	}
	return engine.Connect(g.scope(), spec)
}

// podUndo removes all of a pod but its record. It works on any half of one.
// att is nil when the caller has none open.
func podUndo(ctx context.Context, g *globals, att endpointAttacher, rec podRecord) (err error) {
	if att == nil {
		opened, done, openErr := attacherFor(ctx, g, rec.Datapath == podPlain)
		if openErr != nil {
			return openErr
		}
		defer func() { err = errors.Join(err, done()) }()
		att = opened
	}
	// The interface goes before its programs do, so that it is never up without
	// them; but a device that comes back must not bring them along, if it is known
	// that they are its own.
	steps := []func() error{
		func() error { return link.Delete(rec.linkSpec()) },
		func() error {
			if att == nil || rec.Datapath == podPlain {
				return nil
			}
			return att.RemoveEndpoint(ctx, rec.Endpoint, rec.NetNS, rec.IfName)
		},
	}
	if rec.Mode == link.HostDevice && rec.Endpoint != 0 {
		slices.Reverse(steps)
	}
	var errs []error
	for _, step := range steps {
		errs = append(errs, step())
	}
	if rec.OwnNetNS {
		errs = append(errs, netns.Delete(rec.NetNS))
	}
	return errors.Join(errs...)
}

func podRm(ctx context.Context, g *globals, name string, warn io.Writer) error {
	if !podNameOK.MatchString(name) {
		return usageError{podNameError(name)}
	}
	store := newPodStore(g.StateDir)
	var rec podRecord
	found := false
	err := store.Locked(func() error {
		r, err := store.Read(name)
		if errors.Is(err, os.ErrNotExist) {
			return store.forget(name) // a killed add may not have come further
		}
		if err != nil {
			return err
		}
		if r.State != podReady {
			if err := r.takeable(); err != nil {
				return err
			}
		}
		rec, found = r, true
		// From here on it is half a pod, whoever dies.
		r.State, r.Maker = podMaking, record.ThisMaker()
		return store.write(r)
	})
	if err != nil {
		return err
	}
	if !found {
		fmt.Fprintf(warn, "no pod %s; nothing to remove\n", name)
		return nil
	}
	if err := podUndo(ctx, g, nil, rec); err != nil {
		return fmt.Errorf("remove pod %s: %w", name, err)
	}
	return errors.Join(store.forget(name), cni.LookAgain(g.scope())) // its addresses are nobody's any more
}

// attacherFor returns nil for a plain pod.
func attacherFor(ctx context.Context, g *globals, plain bool) (endpointAttacher, func() error, error) {
	none := func() error { return nil }
	if plain {
		return nil, none, nil
	}
	if openAttacher == nil {
		return nil, none, errors.New("this build of mustang has no datapath: add --plain")
	}
	att, err := openAttacher(ctx, g)
	if err != nil {
		return nil, none, err
	}
	if c, ok := att.(io.Closer); ok {
		return att, c.Close, nil
	}
	return att, none, nil
}

// spec turns flags into a valid link.Spec. It reads the node, and changes
// nothing.
func (f podFlags) spec(g *globals, name string) (link.Spec, error) {
	s := link.Spec{Name: name, Mode: f.mode, NetNS: f.netns, IfName: link.DefaultIfName, HostIfName: link.HostName(name),
		MTU: f.mtu, Uplink: f.uplink, BridgeName: f.bridge, Open: f.plain}
	if !podNameOK.MatchString(name) {
		return s, podNameError(name)
	}
	if !slices.Contains(servicePaths, f.servicePath) {
		return s, fmt.Errorf("--service-path: %q is unknown: use both, socket, tc or none", f.servicePath)
	}
	if f.mac != "" {
		mac, err := net.ParseMAC(f.mac)
		if err != nil {
			return s, fmt.Errorf("--mac: %q is not a MAC address", f.mac)
		}
		s.MAC = mac
	}
	var err error
	if s.IPv4, s.IPv6, err = parsePair("--ip", f.ip, !link.Routed(f.mode)); err != nil {
		return s, err
	}
	gw4, gw6, err := parsePair("--gateway", f.gateway, false)
	if err != nil {
		return s, err
	}
	s.Gateway4, s.Gateway6 = gw4.Addr(), gw6.Addr()
	if err := f.size.apply(&s, f.plain); err != nil {
		return s, err
	}
	if err := s.Validate(); err != nil {
		return s, err
	}
	if err := f.ofOtherModes(); err != nil {
		return s, err
	}
	if err := link.Supported(f.mode); err != nil {
		return s, err
	}
	if link.NeedsUplink(f.mode) {
		if _, err := net.InterfaceByName(f.uplink); err != nil {
			return s, fmt.Errorf("--uplink: %s does not exist: name an interface of this node", f.uplink)
		}
	}
	if s.NetNS == "" {
		s.NetNS = netns.Path(name)
	} else if s.NetNS, err = filepath.Abs(g.path(s.NetNS)); err != nil || !netns.Is(s.NetNS) {
		return s, fmt.Errorf("--netns: %s is not a network namespace: make it with `ip netns add`, or leave the flag out", f.netns)
	}
	return s, nodesOwn(s)
}

// ofOtherModes refuses what says that another mode was meant.
func (f podFlags) ofOtherModes() error {
	switch {
	case f.bridge != link.DefaultBridge && f.mode != link.Bridge:
		return fmt.Errorf("--bridge has no meaning in mode %s: drop it, or give another --mode", f.mode)
	case f.uplink != "" && !link.NeedsUplink(f.mode):
		return fmt.Errorf("--uplink has no meaning in mode %s: drop it, or give another --mode", f.mode)
	}
	return nil
}

// nodesOwn refuses what is this node's: its namespace, and its addresses, which programs
// would take for the pod's.
func nodesOwn(s link.Spec) error {
	home, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	if there, err := os.Stat(s.NetNS); err == nil && os.SameFile(home, there) {
		return fmt.Errorf("--netns: %s is this node's own: give the pod's, or leave the flag out", s.NetNS)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("list this node's addresses: %w", err)
	}
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && (p.Addr() == s.IPv4.Addr() || p.Addr() == s.IPv6.Addr()) {
			return fmt.Errorf("--ip: %s is this node's own: choose another address", p.Addr())
		}
	}
	return nil
}

func podNameError(name string) error {
	return fmt.Errorf("name: %q is not usable: use at most 63 lower-case letters, digits, '-' and '.'", name)
}

// parsePair reads at most one address of each family.
func parsePair(flag, value string, segment bool) (v4, v6 netip.Prefix, err error) {
	if value == "" {
		return v4, v6, nil
	}
	for _, part := range strings.Split(value, ",") {
		p, err := parseAddr(part, segment)
		if err != nil {
			return v4, v6, fmt.Errorf("%s: %q is not an IP address: write one, or one of each family with a comma between", flag, part)
		}
		slot := &v6
		if p.Addr().Is4() {
			slot = &v4
		}
		if slot.IsValid() {
			return v4, v6, fmt.Errorf("%s: %s and %s are of one family: give at most one of each", flag, slot.Addr(), p.Addr())
		}
		*slot = p
	}
	return v4, v6, nil
}

// parseAddr accepts A and A/LEN. One of IPv4 that is written as IPv6 is IPv4.
func parseAddr(s string, segment bool) (netip.Prefix, error) {
	if strings.Contains(s, "/") {
		p, err := netip.ParsePrefix(s)
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		return p, err
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, err
	}
	a = a.Unmap()
	if a.Zone() != "" {
		return netip.Prefix{}, errors.New("zone")
	}
	bits := a.BitLen()
	if segment && a.Is4() {
		bits = 24
	} else if segment {
		bits = 64
	}
	return netip.PrefixFrom(a, bits), nil
}
