// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// ErrNoHold says that this kernel's links hold no network namespace.
var ErrNoHold = errors.New("this kernel has no netfilter programs (Linux 6.4)")

const gatherHeld = "gather-held"

func (d *Datapath) gatherHeldPin() string { return filepath.Join(d.dir, linksDir, gatherHeld) }

// HoldNetns keeps the calling thread's network namespace until ReleaseNetns: a
// pinned link of netfilter holds the one that it is in. Its program lets pass what
// is for the namespace itself. It is ErrNoHold where there are no such programs.
func (d *Datapath) HoldNetns() error {
	if err := d.ReleaseNetns(); err != nil { // of one whose device is gone
		return err
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "hold", Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}, // NF_ACCEPT
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("%w: %w", ErrNoHold, err)
	}
	if err != nil {
		return loadError("the program that holds a network namespace", err)
	}
	defer p.Close()
	l, err := link.AttachNetfilter(link.NetfilterOptions{Program: p, ProtocolFamily: link.NetfilterProtoIPv4, Hook: link.NetfilterInetLocalIn})
	if err != nil {
		return fmt.Errorf("hold a network namespace: %w", err)
	}
	defer l.Close()
	if err := l.Pin(d.gatherHeldPin()); err != nil {
		return fmt.Errorf("pin what holds a network namespace: %w", err)
	}
	return nil
}

// ReleaseNetns is the reverse. Absent is success.
func (d *Datapath) ReleaseNetns() error { return detachPin(d.gatherHeldPin()) }
