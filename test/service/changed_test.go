// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// otherPort is where changedBehindItsHook leads what was sent to 8080.
const otherPort = 8081

// changedBehindItsHook lets a pod with CAP_NET_ADMIN rewrite the port of its own
// datagrams after its hook has seen them: what its hook allowed, and vouched for,
// must not open another port of the receiver.
func (w *world) changedBehindItsHook() {
	defer w.removePolicies()
	w.apply(`{podSelector: {matchLabels: {app: server0}}, ingress: [{ports: [{port: 8080, protocol: UDP}]}]}`)
	if !reach(w.client, "udp", w.direct(0), patience) {
		w.t.Fatal("what is allowed does not pass")
	}
	undo := w.rewriteBehindTheHook()
	w.counts("policy_ingress", "to_pod", func() {
		if reach(w.client, "udp", w.direct(0), slow(silence)) {
			w.t.Error("an answer from a port that nobody may reach")
		}
	})
	undo()
	if !reach(w.client, "udp", w.direct(0), patience) {
		w.t.Error("without the rewriting it does not pass any more")
	}
}

// rewriteBehindTheHook attaches a filter to the client's egress, behind whatever
// is there, that turns UDP to port 8080 to otherPort. Undo takes it away again.
func (w *world) rewriteBehindTheHook() (undo func()) {
	w.t.Helper()
	protocol, proto, l4 := uint16(unix.ETH_P_IP), int32(23), int32(34)
	if w.ipv6 {
		protocol, proto, l4 = unix.ETH_P_IPV6, 20, 54
	}
	const room = -8 // of the stack
	load := func(from, size int32) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, from), asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, room), asm.Mov.Imm(asm.R4, size), asm.FnSkbLoadBytes.Call(),
			asm.JNE.Imm(asm.R0, 0, "done"),
		}
	}
	was, now := int32(htons(8080)), int32(htons(otherPort))
	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	code = append(code, load(proto, 1)...)
	code = append(code, asm.LoadMem(asm.R1, asm.RFP, room, asm.Byte), asm.JNE.Imm(asm.R1, unix.IPPROTO_UDP, "done"))
	code = append(code, load(l4+2, 2)...)
	code = append(code,
		asm.LoadMem(asm.R1, asm.RFP, room, asm.Half), asm.JNE.Imm(asm.R1, was, "done"),
		asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, l4+6), asm.Mov.Imm(asm.R3, was), asm.Mov.Imm(asm.R4, now),
		asm.Mov.Imm(asm.R5, 0x20|2), asm.FnL4CsumReplace.Call(), // BPF_F_MARK_MANGLED_0, two bytes
		asm.StoreImm(asm.RFP, room, int64(now), asm.Half),
		asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, l4+2), asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, room),
		asm.Mov.Imm(asm.R4, 2), asm.Mov.Imm(asm.R5, 0), asm.FnSkbStoreBytes.Call(),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("done"), // TC_ACT_OK
		asm.Return())
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "rewrite", Type: ebpf.SchedCLS, License: "GPL", Instructions: code})
	w.must(err)
	defer prog.Close()
	var filter *netlink.BpfFilter
	w.must(w.client.Do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: eth0.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
		if err := netlink.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		filter = &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: eth0.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: protocol, Priority: 60000},
			Fd:          prog.FD(), Name: "rewrite", DirectAction: true,
		}
		return netlink.FilterAdd(filter)
	}))
	return func() { w.must(w.client.Do(func() error { return netlink.FilterDel(filter) })) }
}

func htons(v uint16) uint16 { return v>>8 | v<<8 }
