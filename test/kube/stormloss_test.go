// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// losses counts the TCP segments that a storm's pods sent, and those of them that
// they sent again. A late answer may be a busy machine's; a segment that is sent again
// was lost, or had no acknowledgement in time, which is the kernel's to send.
type losses struct {
	mu   sync.Mutex
	pods map[string][2]int // sent, sent again, by network namespace
}

// countLosses looks every five seconds until stop, since a pod's counters end with it.
func (c *testCluster) countLosses(stop chan struct{}) *losses {
	l := &losses{pods: map[string][2]int{}}
	nodes := map[string]string{} // a node's own network namespace, by its control group
	for _, node := range []string{"n1", "n2"} {
		nodes[c.cgroup2(c.t, node)] = "net:[" + inode(c.t, "/run/netns/kube-"+c.name+"-"+node) + "]"
	}
	go func() {
		for {
			for group, own := range nodes {
				l.look(group, own)
			}
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Second):
			}
		}
	}()
	return l
}

// look reads the counters of a node's pods: of all that is in its control groups and
// neither in its own network namespace nor in ours, as a command is that enters.
func (l *losses) look(group, own string) {
	ours, _ := os.Readlink("/proc/self/ns/net")
	_ = filepath.WalkDir(group, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil // groups come and go
		}
		pids, _ := os.ReadFile(path)
		for _, pid := range strings.Fields(string(pids)) {
			space, err := os.Readlink("/proc/" + pid + "/ns/net")
			if err != nil || space == own || space == ours {
				continue
			}
			text, _ := os.ReadFile("/proc/" + pid + "/net/snmp")
			if sent, again, err := tcpSegments(string(text)); err == nil {
				l.mu.Lock()
				l.pods[space] = [2]int{sent, again}
				l.mu.Unlock()
			}
		}
		return nil
	})
}

// tcpSegments reads two counters of /proc/net/snmp: a line of names, and one of numbers.
func tcpSegments(text string) (sent, again int, err error) {
	counters := map[string]string{}
	var names []string
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) > 0 && f[0] == "Tcp:" {
			for i, name := range names {
				counters[name] = f[i]
			}
			names = f
		}
	}
	_, err = fmt.Sscan(counters["OutSegs"]+" "+counters["RetransSegs"], &sent, &again)
	return sent, again, err
}

// String says what there was up to now.
func (l *losses) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	sent, again, pods := 0, 0, 0
	for _, n := range l.pods {
		sent, again = sent+n[0], again+n[1]
		if n[1] > 0 {
			pods++
		}
	}
	return fmt.Sprintf("of %d TCP segments %d were sent again, by %d pods", sent, again, pods)
}

func TestTCPSegments(t *testing.T) {
	text, err := os.ReadFile("/proc/self/net/snmp")
	if err != nil {
		t.Fatal(err)
	}
	if sent, again, err := tcpSegments(string(text)); err != nil || sent < again {
		t.Errorf("%d, %d, %v of %s", sent, again, err, text)
	}
	const some = "Tcp: RtoAlgorithm OutSegs RetransSegs InErrs\nTcp: 1 12 3 0\nUdp: InDatagrams\nUdp: 9\n"
	if sent, again, err := tcpSegments(some); sent != 12 || again != 3 || err != nil {
		t.Errorf("%d, %d, %v of %s", sent, again, err, some)
	}
}
