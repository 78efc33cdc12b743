// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"math"
	"os"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// Features are what this kernel can, found by trying, never by its version.
type Features struct {
	TCX          bool `json:"tcx"`           // links at tc hooks (6.6); else clsact filters
	Netkit       bool `json:"netkit"`        // links at netkit's hooks (6.7); else no netkit
	RedirectPeer bool `json:"redirect_peer"` // straight into the pod (5.10)
	NetnsCookie  bool `json:"netns_cookie"`  // sockets told apart by namespace (5.14)
	KtimeCoarse  bool `json:"ktime_coarse"`  // a cheap clock (5.11)
	SetRetval    bool `json:"set_retval"`    // a refused connect() gets its own errno (5.18)
	SockStorage  bool `json:"sock_storage"`  // state that lives with a socket, at connect() (5.10)
	LRU          bool `json:"lru"`           // tables that make room by themselves
	BTF          bool `json:"btf"`           // the kernel describes its own types
	BigTCP6      bool `json:"big_tcp_ipv6"`  // bundles of more than 64 KiB (5.19)
	BigTCP4      bool `json:"big_tcp_ipv4"`  // the same for IPv4 (6.3)
	EndSockets   bool `json:"end_sockets"`   // sockets ended from outside (CONFIG_INET_DIAG_DESTROY)
}

// Without says, one sentence each, what is different for lack of a feature that
// mustang can do without. Modes have sentences of their own.
func (f Features) Without() (sentences []string) {
	for _, c := range []struct {
		has  bool
		lack string
	}{
		{f.TCX, "no tcx (Linux 6.6): filters hold the programs instead of links, and in modes macvlan, ipvlan and host-device a pod with CAP_NET_ADMIN can take them off its own interface"},
		{f.SetRetval, "no bpf_set_retval (Linux 5.18): connect() to a Service that refuses fails with EPERM instead of ECONNREFUSED"},
		{f.BigTCP6, "no BIG TCP (Linux 5.19 for IPv6, 6.3 for IPv4): --big-tcp is refused"},
		{f.BigTCP4 || !f.BigTCP6, "no BIG TCP for IPv4 (Linux 6.3): --big-tcp is for IPv6 alone"},
		{f.EndSockets, ErrNoDestroy.Error()},
	} {
		if !c.has {
			sentences = append(sentences, c.lack)
		}
	}
	return sentences
}

// Missing names what mustang cannot do without and this kernel lacks.
func (f Features) Missing() (names []string) {
	for _, need := range []struct {
		has  bool
		name string
	}{
		{f.RedirectPeer, "bpf_redirect_peer (Linux 5.10)"},
		{f.SockStorage, "socket storage at connect() (5.10)"},
		{f.KtimeCoarse, "bpf_ktime_get_coarse_ns (5.11)"},
		{f.NetnsCookie, "SO_NETNS_COOKIE (5.14)"},
		{f.LRU, "LRU tables"},
		{f.BTF, "BTF (CONFIG_DEBUG_INFO_BTF)"},
	} {
		if !need.has {
			names = append(names, need.name)
		}
	}
	return names
}

// Probe finds this kernel's features; the answer is kept for the process.
var Probe = sync.OnceValue(func() Features {
	helper := func(t ebpf.ProgramType, f asm.BuiltinFunc) bool {
		return features.HaveProgramHelper(t, f) == nil
	}
	_, btf := os.Stat("/sys/kernel/btf/vmlinux")
	_, cookie := netns.Cookie()
	big6, big4 := haveBigTCP()
	return Features{
		TCX:          haveLink(createTCX),
		Netkit:       haveLink(createNetkit),
		RedirectPeer: helper(ebpf.SchedCLS, asm.FnRedirectPeer),
		NetnsCookie:  helper(ebpf.CGroupSockAddr, asm.FnGetNetnsCookie) && cookie == nil,
		KtimeCoarse:  helper(ebpf.SchedCLS, asm.FnKtimeGetCoarseNs),
		SetRetval:    haveSetRetval(),
		SockStorage:  helper(ebpf.CGroupSockAddr, asm.FnSkStorageGet),
		LRU:          features.HaveMapType(ebpf.LRUHash) == nil,
		BTF:          btf == nil,
		BigTCP6:      big6,
		BigTCP4:      big4,
		EndSockets:   haveDestroy(),
	}
})

// haveBigTCP reads the loopback's sizes: a kernel tells those that it knows.
func haveBigTCP() (ipv6, ipv4 bool) {
	lo, err := netlink.LinkByIndex(1) // LOOPBACK_IFINDEX
	if err != nil {
		return false, false
	}
	return lo.Attrs().TSOMaxSize > 0, lo.Attrs().GSOIPv4MaxSize > 0
}

// haveDestroy asks for the end of a socket that cannot be.
func haveDestroy() bool {
	return EndSockets([]Socket{{family: unix.AF_INET, proto: uint8(state.TCP)}}) == nil
}

// haveSetRetval loads a connect() program that sets an errno. (The library's
// probe of a helper by its name says no on Linux 7.3, which has it.)
func haveSetRetval() bool {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:       ebpf.CGroupSockAddr,
		AttachType: ebpf.AttachCGroupInet4Connect,
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, -1), asm.FnSetRetval.Call(), asm.Mov.Imm(asm.R0, 0), asm.Return(),
		},
		License: "MIT",
	})
	if err != nil {
		return false
	}
	prog.Close()
	return true
}

// haveLink attaches to an interface that cannot exist: a kernel with that kind
// of link looks for the interface, one without refuses the call.
func haveLink(create func(ifindex int, h hook, prog *ebpf.Program) (link.Link, error)) bool {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		Instructions: asm.Instructions{asm.LoadImm(asm.R0, 0, asm.DWord), asm.Return()},
		License:      "MIT",
	})
	if err != nil {
		return false
	}
	defer prog.Close()
	l, err := create(math.MaxInt32, hook{ingress: true}, prog)
	if err == nil {
		l.Close()
		return true
	}
	return !errors.Is(err, ebpf.ErrNotSupported)
}
