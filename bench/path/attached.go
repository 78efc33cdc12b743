// SPDX-License-Identifier: Apache-2.0

package path

import (
	"errors"
	"fmt"
	"net"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/lab"
)

// attached is what the kernel has at a pod's interface: whatever put it there,
// what is measured is what packets meet.
type attached struct {
	inPod         bool // inside the pod, else on the host's end
	netkit        bool
	fromPod       *program
	toPod         *program
	mac, neighbor net.HardwareAddr // the pod's; the host end's, or zero
}

func (a *attached) close() {
	if a.fromPod != nil {
		a.fromPod.Close()
	}
	if a.toPod != nil {
		a.toPod.Close()
	}
}

const podInterface = "eth0"

// findAttached looks inside the pod and at the other end of its pair.
func findAttached(node *lab.Node, pod *lab.Pod) (*attached, error) {
	a := &attached{neighbor: make(net.HardwareAddr, 6)}
	peer := 0
	err := pod.Do(func() error {
		l, err := netlink.LinkByName(podInterface)
		if err != nil {
			return fmt.Errorf("pod %s: find %s: %w", pod.Name, podInterface, err)
		}
		a.mac = l.Attrs().HardwareAddr
		a.netkit = l.Type() == "netkit"
		if a.netkit || l.Type() == "veth" {
			peer = l.Attrs().ParentIndex
		}
		return a.find(l.Attrs().Index, true)
	})
	if err != nil || a.fromPod != nil || peer == 0 {
		return a, err
	}
	err = node.Do(func() error {
		l, err := netlink.LinkByIndex(peer)
		if err != nil {
			return fmt.Errorf("pod %s: find the host's end: %w", pod.Name, err)
		}
		a.neighbor = l.Attrs().HardwareAddr
		return a.find(peer, false)
	})
	return a, err
}

// find asks for the programs of an interface in the current namespace. The way
// out of the pod is the interface's egress inside, its ingress outside.
func (a *attached) find(ifindex int, inPod bool) error {
	from, to := at{ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS}, at{ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS}
	if inPod {
		from, to = to, from
	}
	var err1, err2 error
	a.fromPod, err1 = firstProgram(ifindex, from, ebpf.AttachNetkitPeer)
	a.toPod, err2 = firstProgram(ifindex, to, ebpf.AttachNetkitPrimary)
	a.inPod = inPod
	return errors.Join(err1, err2)
}

type at struct {
	tcx    ebpf.AttachType
	clsact uint32
}

// firstProgram returns what meets a packet first at a place, nil for nothing.
func firstProgram(ifindex int, where at, netkit ebpf.AttachType) (*program, error) {
	for _, kind := range []ebpf.AttachType{where.tcx, netkit} {
		// An error: this kernel, or this device, does not have the kind.
		if r, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: kind}); err == nil && len(r.Programs) > 0 {
			return open(r.Programs[0].ID, 0)
		}
	}
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return nil, fmt.Errorf("find interface %d: %w", ifindex, err)
	}
	filters, err := netlink.FilterList(l, where.clsact)
	if err != nil {
		return nil, fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			return open(ebpf.ProgramID(b.Id), b.ClassId)
		}
	}
	return nil, nil
}

// program is one with the class id of the filter that holds it, which a packet
// carries to it; 0: no filter does.
type program struct {
	*ebpf.Program
	class uint32
}

func open(id ebpf.ProgramID, class uint32) (*program, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, fmt.Errorf("open program %d: %w", id, err)
	}
	return &program{p, class}, nil
}
