// SPDX-License-Identifier: Apache-2.0

package datapath

// Sockets that a Service led to its backend, on a kernel that lets nobody load
// an iterator over them: by the kernel's socket diagnosis (sock_diag(7)), which
// tells with each TCP socket what connect() stored; of UDP sockets it tells their
// cookies, by which connect() noted the same where they have no slot. It sees one namespace at a time.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// Of linux/inet_diag.h and linux/sock_diag.h.
const (
	diagReqStorages = 2  // INET_DIAG_REQ_SK_BPF_STORAGES
	diagReqMap      = 1  // SK_DIAG_BPF_STORAGE_REQ_MAP_FD
	diagStorages    = 20 // INET_DIAG_SK_BPF_STORAGES
	diagStorage     = 1  // SK_DIAG_BPF_STORAGE
	diagValue       = 3  // SK_DIAG_BPF_STORAGE_MAP_VALUE
	attrFlags       = unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER
)

type (
	sockPeer = bpfgen.SockSockPeer
	sockSlot = bpfgen.SockSockSlot
)

// ErrNoIterator is a kernel that runs no iterator over sockets: they have to be
// asked for in each namespace (SocketsHere).
var ErrNoIterator = errors.New("this kernel runs no iterator over sockets")

// SocketsHere is Sockets for the calling thread's namespace alone.
func (d *Datapath) SocketsHere(dep *Departures) ([]Socket, error) {
	peers, err := d.table(bpfgen.SockMapMstSockPeersV1)
	if err != nil {
		return nil, err
	}
	slots, err := d.slotSockets(dep)
	if err != nil {
		return nil, err
	}
	out, err := name(slots) // of all namespaces those that are here
	if err != nil {
		return nil, err
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		look := func(p state.Protocol, id []byte, front, back end) {
			// It may have been connected elsewhere since.
			if endOf(connectionOf(family, id).Remote) == back && dep.fate(front, back, uint8(p)) == ends {
				out = append(out, Socket{family: family, proto: uint8(p), id: [diagIDSize]byte(id)})
			}
		}
		var errs [2]error
		if dep.Has(state.TCP) {
			errs[0] = eachPeer(peers.FD(), family, func(id []byte, peer *sockPeer) {
				look(state.TCP, id, end{Addr(peer.Frontend), peer.FrontendPort}, end{Addr(peer.BackendAddr), peer.BackendPort})
			})
		}
		if dep.Has(state.UDP) {
			errs[1] = d.eachConnected(family, func(id []byte, front, back end) { look(state.UDP, id, front, back) })
		}
		if err := errors.Join(errs[:]...); err != nil {
			return nil, fmt.Errorf("list the sockets connected through Services: %w", err)
		}
	}
	return out, nil
}

// eachConnected calls fn with the struct inet_diag_sockid of every connected UDP
// socket that was led to a backend and has no slot, and with its frontend.
func (d *Datapath) eachConnected(family uint8, fn func(id []byte, front, back end)) error {
	flows := bindTable[sockFlowKey, sockFlow](d, bpfgen.SockMapMstSockFlowsV1)
	return eachSocket(family, state.UDP, connectedStates[state.UDP], nil, func(msg []byte) error {
		id := msg[diagMsgID : diagMsgID+diagIDSize]
		back := endOf(connectionOf(family, id).Remote)
		key := sockFlowKey{Cookie: binary.NativeEndian.Uint64(id[diagIDCookie:]), Port: back.port, Kind: bpfgen.SockFlowConnected}
		key.Addr.Bytes = back.addr.Bytes
		flow, known, err := flows.Get(key)
		if known {
			fn(id, end{Addr(flow.Addr), flow.Port}, back)
		}
		return err
	})
}

// eachPeer calls fn with the struct inet_diag_sockid of every TCP socket for which
// connect() stored something, and with that.
func eachPeer(table int, family uint8, fn func(id []byte, peer *sockPeer)) error {
	want := nl.NewRtAttr(diagReqStorages|unix.NLA_F_NESTED, nil)
	want.AddRtAttr(diagReqMap, nl.Uint32Attr(uint32(table)))
	return eachSocket(family, state.TCP, connectedStates[state.TCP], want.Serialize(), func(msg []byte) error {
		value, err := attr(msg[diagMsgSize:], diagStorages, diagStorage, diagValue)
		if err != nil || value == nil {
			return err
		}
		var peer sockPeer
		if len(value) < int(unsafe.Sizeof(peer)) {
			return unix.EBADMSG
		}
		if _, err := binary.Decode(value, binary.NativeEndian, &peer); err != nil {
			return err
		}
		fn(msg[diagMsgID:diagMsgID+diagIDSize], &peer)
		return nil
	})
}

// attr is the payload of the attribute at path, each inside the one before; nil
// when there is none.
func attr(b []byte, path ...uint16) ([]byte, error) {
	for _, want := range path {
		attrs, err := nl.ParseRouteAttr(b)
		if err != nil {
			return nil, err
		}
		b = find(attrs, want)
		if b == nil {
			return nil, nil
		}
	}
	return b, nil
}

func find(attrs []syscall.NetlinkRouteAttr, want uint16) []byte {
	for _, a := range attrs {
		if a.Attr.Type&^attrFlags == want {
			return a.Value
		}
	}
	return nil
}
