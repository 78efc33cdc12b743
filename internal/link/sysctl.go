// SPDX-License-Identifier: Apache-2.0

package link

// Interface sysctls, in the namespace of the calling thread: /proc/sys/net
// shows each thread its own.

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
)

// end says which side of a connection an interface is.
type end int

const (
	endOfPod    end = iota // in the pod
	endRouted              // on the node, routes packets
	endTheirs              // likewise, and somebody else's: all but that is for him to set
	endSwitched            // on the node, a bridge's port: no addresses of its own
)

// ownARP lets an interface answer ARP for the addresses that it has itself, and
// not for the node's others, and ask under them: an ipvlan pod's answer to another
// goes to the uplink, and never reaches who asked.
func ownARP(name string) error {
	for _, s := range []struct{ key, value string }{{"arp_ignore", "1"}, {"arp_announce", "2"}} {
		key := "ipv4/conf/" + name + "/" + s.key
		if err := os.WriteFile(netns.Sysctl(key), []byte(s.value), 0); err != nil {
			return fmt.Errorf("set sysctl net/%s=%s: %w", key, s.value, err)
		}
	}
	return nil
}

// writeSysctl is os.WriteFile outside of Go's poller: these files can be polled, and
// each would wake another thread.
func writeSysctl(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(value))
	return errors.Join(err, unix.Close(fd))
}

// ifSysctls sets what an interface needs before it goes up.
func (s Spec) ifSysctls(name string, v6 bool, e end) error {
	v6 = v6 && e != endSwitched
	settings := make(map[string]string)
	switch {
	case v6:
		settings["ipv6/conf/"+name+"/disable_ipv6"] = "0"
	case e != endTheirs:
		settings["ipv6/conf/"+name+"/disable_ipv6"] = "1"
	}
	if v6 && e != endTheirs {
		// No duplicate detection: the addresses come from whoever allocates
		// them, and a second of waiting is a second of a pod's start.
		settings["ipv6/conf/"+name+"/accept_dad"] = "0"
		settings["ipv6/conf/"+name+"/accept_ra"] = "0"
		settings["ipv6/conf/"+name+"/accept_redirects"] = "0"
	}
	if e == endRouted || e == endTheirs {
		settings["ipv4/conf/"+name+"/forwarding"] = "1"
	}
	if e == endRouted {
		// Strict: what a pod sends must come from the pod's own address.
		settings["ipv4/conf/"+name+"/rp_filter"] = "1"
		settings["ipv4/conf/"+name+"/send_redirects"] = "0"
	}
	for key, value := range settings {
		err := writeSysctl(s.sysctl(key), value)
		if errors.Is(err, fs.ErrNotExist) && !v6 && key == "ipv6/conf/"+name+"/disable_ipv6" {
			continue // a kernel without IPv6 has nothing to switch off
		}
		if err != nil {
			return fmt.Errorf("set sysctl net/%s=%s: %w", key, value, err)
		}
	}
	return nil
}
