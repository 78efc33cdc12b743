// SPDX-License-Identifier: Apache-2.0

package node

// What the kernel says of this node's devices, addresses and routes.

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// settle is for how long changes are gathered: a NIC that comes back says so in
// a dozen messages.
const settle = 100 * time.Millisecond

// What fails is done again after retryFirst, then twice as long up to retryMost.
const (
	retryFirst = 500 * time.Millisecond
	retryMost  = 30 * time.Second
)

// Follow calls changed whenever devices, addresses, routes or routing rules of the
// calling thread's namespace may have changed, and once at the start, until ctx ends.
// What changes while changed runs is told afterwards. When changed fails, which it
// tells by itself, it is called again after a while though nothing comes.
func Follow(ctx context.Context, changed func() error) error {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
		unix.RTNLGRP_IPV6_IFINFO) // a router's advertisement may bring an MTU
	if err != nil {
		return fmt.Errorf("follow this node's devices: %w", err)
	}
	told, ended := make(chan struct{}, 1), make(chan error, 1)
	told <- struct{}{} // first, while there is room for sure
	go func() { ended <- listen(ctx, s, told) }()
	defer func() {
		s.Close()
		<-ended
	}()
	var again <-chan time.Time
	for pause := retryFirst; ; {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			ended <- err
			return err
		case <-told:
		case <-again:
		}
		if err := changed(); err == nil {
			again, pause = nil, retryFirst
		} else {
			again, pause = time.After(pause), min(2*pause, retryMost)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(settle):
		}
	}
}

// listenTimeout bounds how long an end of ctx goes unnoticed.
const listenTimeout = 200 * time.Millisecond

// listen says so when anything comes. Messages that were lost are changes, too.
func listen(ctx context.Context, s *nl.NetlinkSocket, told chan<- struct{}) error {
	timeout := unix.NsecToTimeval(int64(listenTimeout))
	if err := s.SetReceiveTimeout(&timeout); err != nil {
		return fmt.Errorf("follow this node's devices: %w", err)
	}
	for ctx.Err() == nil {
		_, _, err := s.Receive()
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			continue
		case err != nil && !errors.Is(err, unix.ENOBUFS):
			return fmt.Errorf("follow this node's devices: %w", err)
		}
		select {
		case told <- struct{}{}:
		default: // it is known already
		}
	}
	return nil
}
