// SPDX-License-Identifier: Apache-2.0

// Package nft connects to the kernel's nftables, in the network namespace of the
// calling thread, and says whether it has any.
package nft

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// patience is for a whole transaction: the library waits for an answer to each
	// message, and a kernel that refuses all of them at once gives one.
	patience = time.Minute
	// most is the largest transaction, in bytes: the networks of ten thousand nodes have 1 MB.
	most = 8 << 20
)

// ErrNone says that the kernel has no nftables, or none for both families at once (inet).
var ErrNone = errors.New("this kernel has no nftables")

// Connect opens no socket yet: each transaction opens its own.
func Connect() (*nftables.Conn, error) {
	return nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
		return errors.Join(c.SetReadDeadline(time.Now().Add(patience)), c.SetWriteBuffer(most))
	}))
}

// Check is ErrNone where the kernel has no nftables. To be asked before a
// transaction of more than one message, of which such a kernel answers the first alone.
func Check() error {
	c, err := Connect()
	if err != nil {
		return err
	}
	_, err = c.ListTableOfFamily("mustang", nftables.TableFamilyINet)
	switch {
	case err == nil || Absent(err):
		return nil
	case Unsupported(err):
		return ErrNone
	}
	return fmt.Errorf("ask whether there is nftables: %w", err)
}

// Unsupported says whether the answer to a question, not to a change, is that of a
// kernel that has no nftables.
func Unsupported(err error) bool {
	return is(err, ErrNone, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EINVAL)
}

// Absent says that an object is not there.
func Absent(err error) bool { return is(err, unix.ENOENT) }

// is asks the text, too: some of the library's errors keep only that of the kernel's.
func is(err error, any ...error) bool {
	return slices.ContainsFunc(any, func(e error) bool { return errors.Is(err, e) || strings.Contains(err.Error(), e.Error()) })
}
