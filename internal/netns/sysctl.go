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

// ForwardIPv6 has an interface forward, or by "all" each; conf is the directory
// ipv6/conf. Nothing is written where it does already. The kernel drops the routes
// that routers' advertisements brought, on all interfaces, as soon as one forwards,
// and heeds no more on those that do, unless they have accept_ra 2 (ip-sysctl): so
// whoever took advertisements gets that. Not conf/default, for what comes later may
// lead to a container, which is no router.
func ForwardIPv6(conf, name string) error {
	if forwards(conf, name) {
		return nil
	}
	interfaces, err := os.ReadDir(conf)
	if err != nil {
		return err
	}
	for _, i := range interfaces {
		if i.Name() == "all" || i.Name() == "default" || setting(conf, i.Name(), "accept_ra") != "1" || forwards(conf, i.Name()) {
			continue
		}
		err := os.WriteFile(filepath.Join(conf, i.Name(), "accept_ra"), []byte("2"), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // gone meanwhile
			return fmt.Errorf("have %s listen to routers still: %w", i.Name(), err)
		}
	}
	return os.WriteFile(filepath.Join(conf, name, "forwarding"), []byte("1"), 0)
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
