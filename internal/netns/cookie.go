// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Cookie is the number that the kernel gave the calling thread's namespace: unlike
// an inode's it is not used again while the machine runs (SO_NETNS_COOKIE).
func Cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket to ask for the namespace's cookie: %w", err)
	}
	defer unix.Close(fd)
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("the kernel does not tell namespaces apart for sockets (SO_NETNS_COOKIE, Linux 5.14): %w", err)
	}
	return c, nil
}
