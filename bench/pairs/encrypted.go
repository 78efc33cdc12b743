// SPDX-License-Identifier: Apache-2.0

package pairs

// Pods of two nodes whose traffic is encrypted on the wire: WireGuard, and IPsec with
// AES-GCM.

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/lab"
)

// Ways to encrypt.
const (
	WireGuard = "wireguard"
	IPsec     = "ipsec"
)

// Encrypted is a pair by the kernel's routing, with encryption between its nodes.
type Encrypted struct {
	Pair
	With string
}

// Up implements run.Contestant.
func (e Encrypted) Up(ctx context.Context, cgroup string) (_ run.Env, err error) {
	missing, join := wireGuardMissing, joinWireGuard
	if e.With == IPsec {
		missing, join = ipsecMissing, joinIPsec
	}
	if err := missing(); err != nil {
		return nil, err
	}
	e.Join = lab.Join{Kernel: true, Mode: "direct"}
	up, err := e.Pair.Up(ctx, cgroup)
	if err != nil {
		return nil, err
	}
	if err := join(ctx, up.(*env).lab.Nodes()); err != nil {
		return nil, errors.Join(err, up.Close())
	}
	return up, nil
}

// inScratch runs do in a namespace that is gone afterwards.
func inScratch(do func() error) error {
	ns, err := run.NewNetNS(0)
	if err != nil {
		return err
	}
	defer ns.Close()
	w := wirePod{ns: ns}
	space := lab.Space{NetNS: w.path()}
	return space.Do(do)
}

const wgName = "wg0"

func addWireGuard() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = wgName
	return netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs})
}

// wireGuardMissing says what this machine lacks for it, nil when nothing.
func wireGuardMissing() error {
	if err := inScratch(addWireGuard); errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("this kernel has no WireGuard (%w)", errors.ErrUnsupported)
	} else if err != nil {
		return fmt.Errorf("try WireGuard: %w", err)
	}
	if _, err := exec.LookPath("wg"); err != nil {
		return fmt.Errorf("no wg: install the package wireguard-tools (%w)", errors.ErrUnsupported)
	}
	return nil
}

// ipsecMissing says what this machine lacks for it, nil when nothing.
func ipsecMissing() error {
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	return ipsecError(inScratch(func() error { return netlink.XfrmStateAdd(espState(a, b, 1, make([]byte, gcmKey))) }))
}

// ipsecError tells a kernel that lacks a part of it (xfrm_user, ESP, the mode, the cipher)
// from what else can go wrong.
func ipsecError(err error) error {
	lacks := func(e unix.Errno) bool { return errors.Is(err, e) }
	switch {
	case err == nil:
		return nil
	case slices.ContainsFunc([]unix.Errno{unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.ENOPROTOOPT, unix.ENOSYS, unix.ENOENT}, lacks):
		return fmt.Errorf("this kernel has no ESP with AES-GCM (%w)", errors.ErrUnsupported)
	}
	return fmt.Errorf("try IPsec: %w", err)
}

// joinWireGuard gives each node a key and leads the other's pods through the tunnel.
func joinWireGuard(ctx context.Context, nodes []*lab.Node) error {
	keys := make([]*ecdh.PrivateKey, len(nodes))
	for i := range keys {
		var err error
		if keys[i], err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
			return err
		}
	}
	const port = "51820"
	for i, n := range nodes {
		o := nodes[1-i]
		if err := n.Do(addWireGuard); err != nil {
			return fmt.Errorf("create %s: %w", wgName, err)
		}
		cmd := n.Command(ctx, "wg", "set", wgName, "listen-port", port, "private-key", "/dev/stdin",
			"peer", base64.StdEncoding.EncodeToString(keys[1-i].PublicKey().Bytes()), "endpoint", net.JoinHostPort(o.Wire4.String(), port),
			"allowed-ips", o.PodNet4.String()+","+o.PodNet6.String())
		cmd.Stdin = bytes.NewReader([]byte(base64.StdEncoding.EncodeToString(keys[i].Bytes())))
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("wg set: %w: %s", err, bytes.TrimSpace(out))
		}
		if err := n.Do(func() error { return routeVia(wgName, o.PodNet4, o.PodNet6) }); err != nil {
			return err
		}
	}
	return nil
}

// routeVia sets a device of the current namespace up and leads networks to it.
func routeVia(dev string, nets ...netip.Prefix) error {
	link, err := netlink.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("look up %s: %w", dev, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", dev, err)
	}
	for _, p := range nets {
		if err := netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(p), Scope: netlink.SCOPE_LINK}); err != nil {
			return fmt.Errorf("lead %s to %s: %w", p, dev, err)
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// gcmKey is the length in bytes of AES-128's key with RFC 4106's salt.
const gcmKey = 16 + 4

func espState(from, to netip.Addr, spi int, key []byte) *netlink.XfrmState {
	return &netlink.XfrmState{Src: from.AsSlice(), Dst: to.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Spi: spi, Reqid: 1, ReplayWindow: 32,
		Aead: &netlink.XfrmStateAlgo{Name: "rfc4106(gcm(aes))", Key: key, ICVLen: 128}}
}

// joinIPsec encrypts what goes between the nodes' pods, by a tunnel each way.
func joinIPsec(_ context.Context, nodes []*lab.Node) error {
	keys := [2][]byte{make([]byte, gcmKey), make([]byte, gcmKey)}
	for _, key := range keys {
		if _, err := rand.Read(key); err != nil {
			return err
		}
	}
	for i, n := range nodes {
		o := nodes[1-i]
		if err := n.Do(func() error {
			for from, pair := range [2][2]*lab.Node{{nodes[0], nodes[1]}, {nodes[1], nodes[0]}} {
				if err := netlink.XfrmStateAdd(espState(pair[0].Wire4, pair[1].Wire4, from+1, keys[from])); err != nil {
					return fmt.Errorf("add an ESP state: %w", err)
				}
			}
			for _, nets := range [2][2]netip.Prefix{{n.PodNet4, o.PodNet4}, {n.PodNet6, o.PodNet6}} {
				for _, p := range []struct {
					dir      netlink.Dir
					src, dst netip.Prefix
					from, to netip.Addr
				}{
					{netlink.XFRM_DIR_OUT, nets[0], nets[1], n.Wire4, o.Wire4},
					{netlink.XFRM_DIR_IN, nets[1], nets[0], o.Wire4, n.Wire4},
					{netlink.XFRM_DIR_FWD, nets[1], nets[0], o.Wire4, n.Wire4},
				} {
					policy := &netlink.XfrmPolicy{Src: ipNet(p.src), Dst: ipNet(p.dst), Dir: p.dir, Tmpls: []netlink.XfrmPolicyTmpl{{
						Src: p.from.AsSlice(), Dst: p.to.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Reqid: 1}}}
					if err := netlink.XfrmPolicyAdd(policy); err != nil {
						return fmt.Errorf("add an IPsec policy: %w", err)
					}
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}
