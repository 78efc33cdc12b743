// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"os"
	"path/filepath"
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
