// SPDX-License-Identifier: Apache-2.0

package datapath

// Sockets: listing those that a Service led to its backend, by an iterator over
// what connect() stored; naming one to the kernel's socket diagnosis
// (sock_diag(7)); and ending it from outside.

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// Of linux/inet_diag.h and linux/sock_diag.h.
const (
	sockDestroy   = 21
	diagReqSize   = 56 // struct inet_diag_req_v2
	diagReqStates = 4
	diagReqID     = 8
	diagMsgSize   = 72 // struct inet_diag_msg
	diagMsgID     = 4
	diagIDSize    = 48 // struct inet_diag_sockid
	diagIDSrc     = 4
	diagIDDst     = 20
	diagIDIf      = 36
	diagIDCookie  = 40
	// ESTABLISHED, SYN_SENT, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING.
	tcpConnected = 1<<1 | 1<<2 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11
)

// Connection is a connection as its client sees it.
type Connection struct{ Local, Remote netip.AddrPort }

// Socket names one socket to the kernel: by its cookie, so never another.
type Socket struct {
	NetnsCookie uint64
	family      uint8 // 0: only the cookie is known, and where it was connected to
	proto       uint8
	id          [diagIDSize]byte
	cookie      uint64
	back        end
}

// ErrNoDestroy is a kernel that cannot end sockets from outside.
var ErrNoDestroy = errors.New("this kernel cannot end sockets (CONFIG_INET_DIAG_DESTROY); applications keep theirs until they close them")

// Sockets lists the sockets, of all namespaces, that connect() led to a backend
// that has departed, and that are still connected to it, or were when they were
// told of it. The error is ErrNoIterator where each namespace has to be asked
// (SocketsHere).
func (d *Datapath) Sockets(dep *Departures) ([]Socket, error) {
	if !dep.Has(state.UDP) && !dep.Has(state.TCP) {
		return nil, nil
	}
	raw, err := d.readSockets()
	if err != nil {
		return nil, fmt.Errorf("list the sockets connected through Services: %w", err)
	}
	var out []Socket
	const size = int(unsafe.Sizeof(sockSeen{}))
	for ; len(raw) >= size; raw = raw[size:] {
		var seen sockSeen
		if _, err := binary.Decode(raw[:size], binary.NativeEndian, &seen); err != nil {
			return nil, err
		}
		front := end{Addr(seen.Peer.Frontend), seen.Peer.FrontendPort}
		back := end{Addr(seen.Peer.BackendAddr), seen.Peer.BackendPort}
		now := end{Addr(seen.Remote), seen.RemotePort} // it may have been connected elsewhere since
		if now == back && dep.fate(front, back, seen.Proto) == ends {
			out = append(out, socketOf(&seen))
		}
	}
	more, err := d.slotSockets(dep)
	return append(out, more...), err
}

// slotTaken is SOCK_SLOT_TAKEN of bpf/service.h.
const slotTaken = ^uint64(0)

// slotTables are those of sockets that have a slot (bpf/lib/sock_slot.h).
var slotTables = map[state.Protocol]string{
	state.TCP: bpfgen.SockMapMstSockSlotsV1,
	state.UDP: bpfgen.SockMapMstUdpSlotsV1,
}

// slotSockets are those of Sockets that have a slot, and of UDP the unconnected ones,
// too.
func (d *Datapath) slotSockets(dep *Departures) (out []Socket, err error) {
	for p := range slotTables {
		err = errors.Join(err, d.eachSlot(dep, p, func(_ *sockSlot, was sockSlot) {
			out = append(out, Socket{NetnsCookie: was.NetnsCookie, proto: uint8(p), cookie: was.Cookie,
				back: end{Addr(was.Peer.BackendAddr), was.Peer.BackendPort}})
		}))
	}
	return out, err
}

// eachSlot calls fn for each slot, of a protocol's, whose socket was led to a backend
// that has departed, with a copy as it was a moment ago.
func (d *Datapath) eachSlot(dep *Departures, p state.Protocol, fn func(s *sockSlot, was sockSlot)) error {
	if !dep.Has(p) {
		return nil
	}
	return withMapped(d, slotTables[p], func(slots []sockSlot) error {
		for i := range slots {
			cookie := atomic.LoadUint64(&slots[i].Cookie)
			if cookie == 0 || cookie == slotTaken {
				continue
			}
			was := slots[i]
			front := end{Addr(was.Peer.Frontend), was.Peer.FrontendPort}
			back := end{Addr(was.Peer.BackendAddr), was.Peer.BackendPort}
			// Another socket may have come meanwhile: then the rest is not of one and the same.
			if atomic.LoadUint64(&slots[i].Cookie) == cookie && dep.fate(front, back, uint8(p)) == ends {
				was.Cookie = cookie
				fn(&slots[i], was)
			}
		}
		return nil
	})
}

// name finds those of list of which only the cookie is known among the sockets of
// the calling thread's namespace; one that has closed, or is connected elsewhere
// by now or not at all, is left out.
func name(list []Socket) ([]Socket, error) {
	cookies := map[state.Protocol]map[uint64]end{state.TCP: {}, state.UDP: {}}
	out := list[:0:0]
	for _, s := range list {
		if s.family == 0 {
			cookies[state.Protocol(s.proto)][s.cookie] = s.back
		} else {
			out = append(out, s)
		}
	}
	for p, wanted := range cookies {
		if len(wanted) == 0 {
			continue
		}
		more, err := connected(p, func(id []byte, c Connection) bool {
			back, ok := wanted[binary.NativeEndian.Uint64(id[diagIDCookie:])]
			return ok && endOf(c.Remote) == back
		})
		if err != nil {
			return nil, err
		}
		out = append(out, more...)
	}
	return out, nil
}

// readSockets runs the iterator, which writes one struct sock_seen a socket.
func (d *Datapath) readSockets() ([]byte, error) {
	if err := d.PrepareSockets(); err != nil {
		return nil, err
	}
	peers, err := d.table(bpfgen.SockMapMstSockPeersV1)
	if err != nil {
		return nil, err
	}
	it, err := link.AttachIter(link.IterOptions{Program: d.sockets, Map: peers})
	if err != nil {
		return nil, err
	}
	defer it.Close()
	r, err := it.Open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// socketsPin is the prefix of the iterator's pin; the object's hash follows.
const socketsPin = "sockets-"

// PrepareSockets makes ready what Sockets runs. The first time on a node that
// takes some 30 ms, better spent before a change than after it. The error is
// ErrNoIterator where the kernel lets nobody load it.
func (d *Datapath) PrepareSockets() error {
	if d.sockets != nil || d.noIterator != nil {
		return d.noIterator
	}
	hash := sha256.Sum256(bpfgen.IterObject())
	path := filepath.Join(d.dir, programsDir, fmt.Sprintf("%s%x", socketsPin, hash[:8]))
	p, err := ebpf.LoadPinnedProgram(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		p, err = d.loadSockets(path)
	}
	if errors.Is(err, unix.EPERM) {
		d.noIterator = fmt.Errorf("%w (%w)", ErrNoIterator, err)
		return d.noIterator
	}
	if err != nil {
		return loadError("the iterator over sockets", err)
	}
	d.sockets = p
	return nil
}

// loadSockets loads the iterator and pins it in the place of other builds'.
func (d *Datapath) loadSockets(path string) (*ebpf.Program, error) {
	spec, err := bpfgen.LoadIter()
	if err != nil {
		return nil, err
	}
	p, err := ebpf.NewProgram(spec.Programs[bpfgen.IterProgMstSockets])
	if err != nil {
		return nil, err
	}
	others, err := filepath.Glob(filepath.Join(filepath.Dir(path), socketsPin+"*"))
	for _, other := range others {
		err = errors.Join(err, removePin(other))
	}
	if err = errors.Join(err, p.Pin(path)); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

func socketOf(seen *sockSeen) Socket {
	s := Socket{NetnsCookie: seen.NetnsCookie, family: uint8(seen.Family), proto: seen.Proto}
	binary.NativeEndian.PutUint16(s.id[0:], seen.LocalPort)
	binary.NativeEndian.PutUint16(s.id[2:], seen.RemotePort)
	if s.family == unix.AF_INET {
		copy(s.id[diagIDSrc:], seen.Local.Bytes[12:])
		copy(s.id[diagIDDst:], seen.Remote.Bytes[12:])
	} else {
		copy(s.id[diagIDSrc:], seen.Local.Bytes[:])
		copy(s.id[diagIDDst:], seen.Remote.Bytes[:])
	}
	binary.NativeEndian.PutUint32(s.id[diagIDIf:], seen.BoundIf)
	binary.NativeEndian.PutUint32(s.id[diagIDCookie:], uint32(seen.Cookie))
	binary.NativeEndian.PutUint32(s.id[diagIDCookie+4:], uint32(seen.Cookie>>32))
	return s
}

// ClientSockets lists the TCP sockets in the calling thread's namespace that
// are the clients' ends of conns.
func ClientSockets(conns map[Connection]bool) ([]Socket, error) {
	return connected(state.TCP, func(_ []byte, c Connection) bool { return conns[c] })
}

// connectedStates are those of a socket that is connected: a connected UDP socket
// counts as ESTABLISHED.
var connectedStates = map[state.Protocol]uint32{state.TCP: tcpConnected, state.UDP: 1 << 1}

// connected lists the connected sockets of the calling thread's namespace that fn
// wants: it is given the struct inet_diag_sockid of each.
func connected(p state.Protocol, fn func(id []byte, c Connection) bool) (out []Socket, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		err := eachSocket(family, p, connectedStates[p], nil, func(msg []byte) error {
			id := msg[diagMsgID : diagMsgID+diagIDSize]
			if fn(id, connectionOf(family, id)) {
				out = append(out, Socket{family: family, proto: uint8(p), id: [diagIDSize]byte(id)})
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("list %s sockets: %w", p, err)
		}
	}
	return out, nil
}

// eachSocket calls fn with the struct inet_diag_msg, and what follows it, of every
// socket of the calling thread's namespace in one of these states; attrs is what
// else is asked. An error of fn ends it.
func eachSocket(family uint8, p state.Protocol, states uint32, attrs []byte, fn func(msg []byte) error) error {
	req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	req.AddRawData(append(diagRequest(family, uint8(p), states, nil), attrs...)) // as one: AddData would put them first
	var bad error
	err := req.ExecuteIter(unix.NETLINK_SOCK_DIAG, nl.SOCK_DIAG_BY_FAMILY, func(msg []byte) bool {
		if bad = unix.EBADMSG; len(msg) >= diagMsgSize {
			bad = fn(msg)
		}
		return bad == nil
	})
	return errors.Join(bad, err)
}

func connectionOf(family uint8, id []byte) Connection {
	at := func(addr, port int) netip.AddrPort {
		p := binary.BigEndian.Uint16(id[port:])
		if family == unix.AF_INET {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(id[addr:])), p)
		}
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(id[addr:])).Unmap(), p)
	}
	return Connection{Local: at(diagIDSrc, 0), Remote: at(diagIDDst, 2)}
}

// EndSockets destroys sockets of the calling thread's namespace; the
// application gets ECONNABORTED. One that has closed meanwhile is no error.
func EndSockets(list []Socket) error {
	list, err := name(list)
	if err != nil {
		return err
	}
	for _, s := range list {
		req := nl.NewNetlinkRequest(sockDestroy, unix.NLM_F_ACK)
		req.AddRawData(diagRequest(s.family, s.proto, 0, s.id[:]))
		_, err := req.Execute(unix.NETLINK_SOCK_DIAG, 0)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESTALE):
		case errors.Is(err, unix.EOPNOTSUPP):
			return ErrNoDestroy
		default:
			return fmt.Errorf("end a socket: %w", err)
		}
	}
	return nil
}

// diagRequest is a struct inet_diag_req_v2.
func diagRequest(family, proto uint8, states uint32, id []byte) []byte {
	b := make([]byte, diagReqSize)
	b[0], b[1] = family, proto
	binary.NativeEndian.PutUint32(b[diagReqStates:], states)
	copy(b[diagReqID:], id)
	return b
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
