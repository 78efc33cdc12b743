// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// hostSysctls is where deploy/ mounts the host's /proc/sys/net for the agent: a
// container's own can only be read, unless it is privileged.
const hostSysctls = "/host/proc/sys/net"

var sysctlDir = sync.OnceValue(func() string {
	if info, err := os.Stat(hostSysctls); err == nil && info.IsDir() {
		return hostSysctls
	}
	return "/proc/sys/net"
})

// Sysctl is the file of a sysctl below net, such as "ipv4/ip_forward". It is that
// of the calling thread's namespace.
func Sysctl(key string) string { return filepath.Join(sysctlDir(), key) }

// SysctlOff says that one is 0. One that cannot be read says nothing.
func SysctlOff(key string) bool {
	text, err := os.ReadFile(Sysctl(key))
	return err == nil && strings.TrimSpace(string(text)) == "0"
}

// ForwardIPv6 has an interface forward, or by "all" each; conf is the directory
// ipv6/conf. Nothing is written where it does already. The kernel drops the routes
// that routers' advertisements brought, on all interfaces, as soon as one forwards,
// and heeds no more on those that do, unless they have accept_ra 2 (ip-sysctl): so
// interfaces by which such routes lead get that. No others: one that waits for an
// advertisement may lead to a container, which is no router.
func ForwardIPv6(conf, name string) error {
	if forwards(conf, name) {
		return nil
	}
	advertised, err := Routes(netlink.FAMILY_V6, &netlink.Route{Protocol: unix.RTPROT_RA}, netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return fmt.Errorf("list routes that routers advertise: %w", err)
	}
	for _, r := range advertised {
		for _, hop := range append(r.MultiPath, &netlink.NexthopInfo{LinkIndex: r.LinkIndex}) {
			if err := keepListening(conf, hop.LinkIndex); err != nil {
				return err
			}
		}
	}
	return os.WriteFile(filepath.Join(conf, name, "forwarding"), []byte("1"), 0)
}

// keepListening has an interface that takes advertisements do so when it forwards.
func keepListening(conf string, index int) error {
	l, err := netlink.LinkByIndex(index)
	if err != nil {
		return nil // gone meanwhile, or there is none of that number
	}
	name := l.Attrs().Name
	if setting(conf, name, "accept_ra") != "1" || forwards(conf, name) {
		return nil
	}
	if err := os.WriteFile(filepath.Join(conf, name, "accept_ra"), []byte("2"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("have %s listen to routers still: %w", name, err)
	}
	return nil
}

func forwards(conf, name string) bool {
	v := setting(conf, name, "forwarding")
	return v != "" && v != "0"
}

// setting is "" where there is none.
func setting(conf, name, key string) string {
	text, _ := os.ReadFile(filepath.Join(conf, name, key))
	return strings.TrimSpace(string(text))
}
