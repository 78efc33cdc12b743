// SPDX-License-Identifier: Apache-2.0

package datapath

// Sockets as the kernel's socket diagnosis (sock_diag(7)) shows them, with what
// our programs stored in them, and ending one from outside.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// Of linux/inet_diag.h and linux/sock_diag.h.
const (
	sockDestroy        = 21
	diagReqStorages    = 2  // INET_DIAG_REQ_SK_BPF_STORAGES
	diagReqMapFD       = 1  // SK_DIAG_BPF_STORAGE_REQ_MAP_FD
	diagStorages       = 20 // INET_DIAG_SK_BPF_STORAGES
	diagStorage        = 1  // SK_DIAG_BPF_STORAGE
	diagStorageValue   = 3  // SK_DIAG_BPF_STORAGE_MAP_VALUE
	diagReqSize        = 56 // struct inet_diag_req_v2
	diagMsgSize        = 72 // struct inet_diag_msg
	diagIDSize         = 48 // struct inet_diag_sockid
	diagMsgID          = 4  // where the id is in the message
	diagReqID          = 8  // and in the request
	diagReqStates      = 4
	attributeKind      = 0x3fff // NLA_TYPE_MASK
	tcpEstablished     = 1
	tcpStatesConnected = 1<<tcpEstablished | 1<<2 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11 // SYN_SENT, FIN_WAIT1, 2, CLOSE_WAIT, LAST_ACK, CLOSING
)

// Connection is a connection as its client sees it.
type Connection struct{ Local, Remote netip.AddrPort }

// ErrNoDestroy is a kernel that cannot end sockets from outside.
var ErrNoDestroy = errors.New("this kernel cannot end sockets (CONFIG_INET_DIAG_DESTROY); applications keep theirs to a backend that has left until they close them")

// EndSockets destroys the connected sockets in the calling thread's namespace
// that go to a departed backend: those that connect() led there, and the
// clients of the translated TCP connections in conns. No other is touched: each
// is named by its cookie. The application gets ECONNABORTED.
func (d *Datapath) EndSockets(dep *Departures, conns map[Connection]bool) (ended int, err error) {
	for _, p := range []state.Protocol{state.UDP, state.TCP} {
		if !dep.Has(p) {
			continue
		}
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			n, err := d.endSockets(dep, conns, family, p)
			ended += n
			if err != nil {
				return ended, err
			}
		}
	}
	return ended, nil
}

func (d *Datapath) endSockets(dep *Departures, conns map[Connection]bool, family uint8, p state.Protocol) (ended int, err error) {
	var ids [][]byte
	err = d.eachSocket(family, p, func(id []byte, c Connection, peer *sockPeer) {
		if p == state.TCP && conns[c] || peer != nil && dep.fateOfSocket(c, peer, p) == ends {
			ids = append(ids, append([]byte(nil), id...))
		}
	})
	if err != nil {
		return 0, fmt.Errorf("list %s sockets: %w", p, err)
	}
	for _, id := range ids {
		switch err := destroy(family, p, id); {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESTALE): // closed meanwhile
		case errors.Is(err, unix.EOPNOTSUPP):
			return ended, ErrNoDestroy
		case err != nil:
			return ended, fmt.Errorf("end a %s socket: %w", p, err)
		default:
			ended++
		}
	}
	return ended, nil
}

// fateOfSocket is stays for a socket that has been connected elsewhere since.
func (d *Departures) fateOfSocket(c Connection, peer *sockPeer, p state.Protocol) fate {
	back := end{Addr(peer.BackendAddr), peer.BackendPort}
	if back.addrPort() != c.Remote {
		return stays
	}
	return d.fate(end{Addr(peer.Frontend), peer.FrontendPort}, back, uint8(p))
}

func diagRequest(family uint8, p state.Protocol, states uint32, id []byte) []byte {
	b := make([]byte, diagReqSize)
	b[0], b[1] = family, uint8(p)
	binary.NativeEndian.PutUint32(b[diagReqStates:], states)
	copy(b[diagReqID:], id)
	return b
}

// eachSocket calls fn with every connected socket of the calling thread's
// namespace; peer is nil for one without a Service.
func (d *Datapath) eachSocket(family uint8, p state.Protocol, fn func(id []byte, c Connection, peer *sockPeer)) error {
	states := uint32(1 << tcpEstablished) // of UDP: connected
	if p == state.TCP {
		states = tcpStatesConnected
	}
	req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	req.AddRawData(diagRequest(family, p, states, nil))
	storages := nl.NewRtAttr(diagReqStorages, nil)
	storages.AddRtAttr(diagReqMapFD, nl.Uint32Attr(uint32(d.maps[bpfgen.SockMapMstSockPeersV1].FD())))
	req.AddData(storages)
	var bad error
	err := req.ExecuteIter(unix.NETLINK_SOCK_DIAG, nl.SOCK_DIAG_BY_FAMILY, func(msg []byte) bool {
		if len(msg) < diagMsgSize {
			bad = unix.EBADMSG
			return false
		}
		id := msg[diagMsgID : diagMsgID+diagIDSize]
		peer, err := peerOf(msg[diagMsgSize:])
		if err != nil {
			bad = err
			return false
		}
		fn(id, connectionOf(msg[0], id), peer)
		return true
	})
	return errors.Join(bad, err)
}

// connectionOf reads a struct inet_diag_sockid: ports, addresses.
func connectionOf(family uint8, id []byte) Connection {
	at := func(addr, port int) netip.AddrPort {
		p := binary.BigEndian.Uint16(id[port:])
		if family == unix.AF_INET {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(id[addr:])), p)
		}
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(id[addr:])).Unmap(), p)
	}
	return Connection{Local: at(4, 0), Remote: at(20, 2)}
}

// peerOf finds what connect() stored among a socket's attributes.
func peerOf(attributes []byte) (*sockPeer, error) {
	value := attributes
	for _, kind := range []uint16{diagStorages, diagStorage, diagStorageValue} {
		list, err := nl.ParseRouteAttr(value)
		if err != nil {
			return nil, err
		}
		value = nil
		for _, a := range list {
			if a.Attr.Type&attributeKind == kind {
				value = a.Value
				break
			}
		}
		if value == nil {
			return nil, nil
		}
	}
	var peer sockPeer
	if _, err := binary.Decode(value, binary.NativeEndian, &peer); err != nil {
		return nil, err
	}
	return &peer, nil
}

func destroy(family uint8, p state.Protocol, id []byte) error {
	req := nl.NewNetlinkRequest(sockDestroy, unix.NLM_F_ACK)
	req.AddRawData(diagRequest(family, p, 0, id))
	_, err := req.Execute(unix.NETLINK_SOCK_DIAG, 0)
	return err
}

// Grace waits until every program that was under way has ended, and with it
// whatever it read of the tables.
func Grace() error {
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, 1, 0, 0) // MEMBARRIER_CMD_GLOBAL: synchronize_rcu()
	if errno != 0 {
		return errno
	}
	return nil
}
