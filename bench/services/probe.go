// SPDX-License-Identifier: Apache-2.0

package services

// When does a change reach packets? Connections are opened at a fixed pace,
// whatever became of those before: one that meets nothing does not delay the
// next.

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/test/kube"
)

const (
	probeEvery = 500 * time.Microsecond // the resolution of every change's figure
	coldEvery  = 5 * time.Millisecond   // and of the cold sync's: probes are not to take its CPU for minutes
	probesMost = 256                    // open at once; the oldest is given up
)

// probes are connections under way, the oldest first.
type probes struct {
	to  unix.SockaddrInet4
	fds []unix.PollFd
}

// open begins one more. One that is refused at once is none.
func (p *probes) open() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a probe: %w", err)
	}
	// Closed by a reset, so that no end keeps the ports.
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	if err := unix.Connect(fd, &p.to); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return unix.Close(fd)
	}
	if len(p.fds) == probesMost {
		p.end(0)
	}
	p.fds = append(p.fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	return nil
}

func (p *probes) end(i int) {
	unix.Close(int(p.fds[i].Fd))
	p.fds = append(p.fds[:i], p.fds[i+1:]...)
}

func (p *probes) close() {
	for len(p.fds) > 0 {
		p.end(len(p.fds) - 1)
	}
}

// answered waits up to d, and says whether a server of this name has answered;
// else, who has.
func (p *probes) answered(name string, d time.Duration) (ok bool, by string, err error) {
	wait := unix.NsecToTimespec(max(d, 0).Nanoseconds())
	if _, err := unix.Ppoll(p.fds, &wait, nil); err != nil && !errors.Is(err, unix.EINTR) {
		return false, "", err
	}
	buf := make([]byte, 64)
	for i := len(p.fds) - 1; i >= 0; i-- {
		if p.fds[i].Revents == 0 {
			continue
		}
		if n, err := unix.Read(int(p.fds[i].Fd), buf); err == nil && n > 0 {
			by = string(buf[:n])
			ok = ok || by == name
		}
		p.end(i)
	}
	return ok, by, nil
}

// until opens connections from the client's pod until a server of this name
// answers one, and says how many milliseconds after start that was.
func (b *bench) until(ctx context.Context, start time.Time, to netip.AddrPort, name string) (took float64, err error) {
	return b.untilEvery(ctx, probeEvery, start, to, name)
}

func (b *bench) untilEvery(ctx context.Context, every time.Duration, start time.Time, to netip.AddrPort, name string) (took float64, err error) {
	err = b.client.Do(func() error {
		p := probes{to: unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}}
		defer p.close()
		last, looked := "", start
		for next := time.Now(); time.Since(start) < b.patience; next = next.Add(every) {
			if err := errors.Join(ctx.Err(), p.open()); err != nil {
				return err
			}
			for first := true; first || time.Now().Before(next.Add(every)); first = false {
				ok, by, err := p.answered(name, time.Until(next.Add(every)))
				if err != nil {
					return err
				}
				if ok {
					took = milliseconds(time.Since(start))
					return nil
				}
				if by != "" {
					last = by
				}
			}
			if time.Since(looked) > time.Second {
				if kube.Ended(b.pid) {
					return fmt.Errorf("%s has ended", b.name)
				}
				looked = time.Now()
			}
			if late := time.Since(next); late > 10*every {
				next = time.Now() // this process did not run: do not catch up
			}
		}
		return fmt.Errorf("%s does not answer at %s within %v; %q did last", name, to, b.patience, last)
	})
	return took, err
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
