// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/lab"
)

// How much travels as one: between pods with a local MTU or BIG TCP, and beyond the node.

func TestBigTCP(t *testing.T) {
	for _, mode := range modes() {
		if mode == lab.HostDevice { // its size is the owner's to set
			continue
		}
		for _, path := range chosen(pathsVariable, lab.MustangTC, lab.MustangSocket) {
			for _, local := range []string{"off", "auto"} {
				if local == "auto" && mode != lab.Veth {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/local-mtu %s", mode, path, local), func(t *testing.T) {
					w := newWorldOf(t, lab.Config{Mode: mode, Services: path, LocalMTU: local, BigTCP: 196608})
					w.serveOutside()
					for _, family := range []string{"ipv4", "ipv6"} {
						t.Run(family, func(t *testing.T) { w.on(t, family).bigTCP() })
					}
				})
			}
		}
	}
}

func (w *world) bigTCP() {
	w.needsBigTCP()
	for _, dst := range []netip.AddrPort{w.direct(0), w.twin()} {
		if longest := w.longestBundle(dst, w.servers[0], noBigTCP, 20); longest <= noBigTCP {
			w.t.Errorf("to %s: the longest bundle had %d bytes, want more than %d", dst, longest, noBigTCP)
		}
	}
	w.bulkBy(w.beyond(), 2<<20)
	w.bulkBy(w.beyondService(), 2<<20)
}

func (w *world) needsBigTCP() {
	var uplink netlink.Link
	w.must(w.lab.Node().Do(func() (err error) {
		uplink, err = netlink.LinkByName(lab.Uplink)
		return err
	}))
	switch a := uplink.Attrs(); {
	case a.TSOMaxSize == 0:
		w.t.Skip("this kernel has no BIG TCP")
	case !w.ipv6 && a.GSOIPv4MaxSize == 0:
		w.t.Skip("this kernel has no BIG TCP for IPv4")
	}
}

// bundlesFollowTheWay: between pods bundles are large. Those that leave the node
// are not, but as large as one packet may be: else the wire's device would cut them.
func (w *world) bundlesFollowTheWay() {
	w.needsBigTCP()
	if longest := w.longestBundle(w.direct(0), w.servers[0], noBigTCP, 20); longest <= noBigTCP {
		w.t.Errorf("to a sibling: the longest bundle had %d bytes, want more than %d", longest, noBigTCP)
	}
	for _, dst := range []netip.AddrPort{w.beyond(), w.beyondService()} {
		if longest := w.longestBundle(dst, w.lab.Node(), noBigTCP, 2); longest > noBigTCP {
			w.t.Errorf("to %s: the longest bundle had %d bytes, want no more than %d", dst, longest, noBigTCP)
		}
		const most = noBigTCP * 3 / 4
		if longest := w.longestBundle(dst, w.lab.Outside(), most, 20); longest <= most {
			w.t.Errorf("to %s: the longest bundle that came had %d bytes, want more than %d", dst, longest, most)
		}
	}
}

// longestBundle streams to dst, several times, until a bundle of more than enough bytes
// comes by in a namespace, and says how long the longest such was. TCP bundles what a
// millisecond takes: a stream that had no processor makes none.
func (w *world) longestBundle(dst netip.AddrPort, at space, enough uint32, tries int) (longest int) {
	w.t.Helper()
	for range tries {
		watched := w.watchLongest(at, enough)
		w.bulkBy(dst, oneBunch)
		if longest = watched(); longest > int(enough) {
			break
		}
	}
	return longest
}

// watchLongest sees what comes to a namespace's interfaces and is longer than enough;
// the function that it returns ends that and says how long the longest packet was.
// All others stay out of its socket, which holds few.
func (w *world) watchLongest(at space, enough uint32) func() int {
	w.t.Helper()
	fd := -1
	w.must(at.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0x0300) // ETH_P_ALL
		return err
	}))
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_LEN},
		{Code: unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K, K: enough, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: math.MaxUint32},
		{Code: unix.BPF_RET | unix.BPF_K},
	}
	w.must(unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}))
	w.must(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}))
	stop, longest := make(chan struct{}), make(chan int, 1)
	go func() {
		defer unix.Close(fd)
		most, buf := 0, make([]byte, 64)
		for {
			n, _, err := unix.Recvfrom(fd, buf, unix.MSG_TRUNC)
			most = max(most, n)
			select {
			case <-stop:
				longest <- most
				return
			default:
			}
			if err != nil && err != unix.EAGAIN && err != unix.EINTR {
				longest <- -1
				return
			}
		}
	}()
	return func() int { close(stop); return <-longest }
}

// TestBigTCPEndsAtTheUplink: a bundle that the uplink cannot send at once would
// be cut in software there, so the pod makes none, and its owner is told.
func TestBigTCPEndsAtTheUplink(t *testing.T) {
	onlyWith(t, lab.Veth)
	w := newWorldOf(t, lab.Config{Mode: lab.Veth, Services: lab.Mustang})
	for _, c := range []struct {
		uplink int
		want   int // 0: off
	}{{0, 0}, {131072, 131072}, {524280, 524280}} {
		w.must(w.lab.Node().Do(func() error {
			l, err := netlink.LinkByName(lab.Uplink)
			if err != nil || c.uplink == 0 {
				return err
			}
			return errors.Join(netlink.LinkSetGSOMaxSize(l, c.uplink), netlink.LinkSetGSOIPv4MaxSize(l, c.uplink))
		}))
		name := "big" + strings.TrimPrefix(w.lab.Name(), "t")
		cmd := w.lab.Node().Command(context.Background(), w.lab.MustangArgs("pod", "add", name, "--ip=10.1.9.9,fd00:10:1::909", "--big-tcp")...)
		said, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		if told := strings.Contains(string(said), lab.Uplink); told != (c.want != 524280) {
			t.Errorf("uplink %d: the tool said %q", c.uplink, said)
		}
		out, err := exec.Command("ip", "-n", name, "-d", "link", "show", "eth0").Output()
		w.must(err)
		want := fmt.Sprintf("gso_max_size %d ", max(c.want, 65536))
		if !strings.Contains(string(out), want) {
			t.Errorf("uplink %d: want %s in %s", c.uplink, want, out)
		}
		_, err = w.lab.Mustang(context.Background(), "pod", "rm", name)
		w.must(err)
	}
}
