// SPDX-License-Identifier: Apache-2.0

package link

// A small ping, since not every machine has one.

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// ping sends one echo request from a namespace and returns how long the answer
// took.
func ping(nsPath string, dst netip.Addr, deadline time.Duration) (took time.Duration, err error) {
	err = netns.Do(nsPath, func() error {
		took, err = pingHere(dst, deadline)
		return err
	})
	if err != nil {
		err = fmt.Errorf("ping %s from %s: %w", dst, nsPath, err)
	}
	return took, err
}

func pingHere(dst netip.Addr, deadline time.Duration) (time.Duration, error) {
	fam, proto, request, reply := unix.AF_INET, unix.IPPROTO_ICMP, byte(8), byte(0)
	var to unix.Sockaddr = &unix.SockaddrInet4{Addr: as4(dst)}
	if dst.Is6() {
		fam, proto, request, reply = unix.AF_INET6, unix.IPPROTO_ICMPV6, 128, 129
		to = &unix.SockaddrInet6{Addr: dst.As16()}
	}
	fd, err := unix.Socket(fam, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	msg := make([]byte, 16)
	msg[0] = request
	binary.BigEndian.PutUint16(msg[4:], uint16(os.Getpid()))
	binary.BigEndian.PutUint64(msg[8:], uint64(time.Now().UnixNano()))
	if fam == unix.AF_INET { // for ICMPv6 the kernel does it
		binary.BigEndian.PutUint16(msg[2:], checksum(msg))
	}
	start := time.Now()
	if err := unix.Sendto(fd, msg, 0, to); err != nil {
		return 0, err
	}
	return awaitReply(fd, fam, reply, msg[8:], start, deadline)
}

func awaitReply(fd, fam int, reply byte, cookie []byte, start time.Time, deadline time.Duration) (time.Duration, error) {
	buf := make([]byte, 1500)
	for {
		left := deadline - time.Since(start)
		if left <= 0 {
			return 0, fmt.Errorf("no answer in %s", deadline)
		}
		tv := unix.NsecToTimeval(left.Nanoseconds())
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
			return 0, err
		}
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err == unix.EAGAIN || err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, err
		}
		pkt := buf[:n]
		if fam == unix.AF_INET && len(pkt) >= 20 {
			pkt = pkt[int(pkt[0]&0xf)*4:]
		}
		if len(pkt) >= 16 && pkt[0] == reply && string(pkt[8:16]) == string(cookie) {
			return time.Since(start), nil
		}
	}
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func as4(a netip.Addr) (out [4]byte) {
	if a.Is4() {
		out = a.As4()
	}
	return out
}
