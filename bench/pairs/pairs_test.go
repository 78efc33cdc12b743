// SPDX-License-Identifier: Apache-2.0

package pairs

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/built"
)

var binary string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Getuid() != 0 {
			fmt.Println("needs root")
			return 0
		}
		dir, err := os.MkdirTemp("", "pairs-test")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		if binary, err = built.Binary(dir, "mustang", "MUSTANG_BIN"); err != nil {
			fmt.Println(err)
			return 1
		}
		return m.Run()
	}())
}

func TestWhatIsRunIsAnInput(t *testing.T) { built.Declare(t, "mustang") }

// up brings a contestant up and returns what the server sees over each of its paths.
func up(t *testing.T, c run.Contestant) (seen map[string]string) {
	t.Helper()
	env, err := c.Up(t.Context(), "")
	if err != nil {
		t.Fatalf("%s: %v", c.Name(), err)
	}
	defer func() {
		if err := env.Close(); err != nil {
			t.Error(err)
		}
	}()
	seen = map[string]string{}
	for _, p := range env.Paths() {
		from, err := peerOf(p.Target)
		if err != nil {
			t.Errorf("%s: %v", p.Subject.ID, err)
		}
		seen[p.Subject.Via] = from
	}
	return seen
}

func TestPairsReachEachOther(t *testing.T) {
	ways := []string{report.PodIP, ToNode}
	both := append(ways, report.ClusterIP)
	for i, c := range []struct {
		p    Pair
		pod  string // whom the server sees
		node string // whom the other node sees
	}{
		{Pair{Bare: true, Rules: NoTrack, By: lab.NoServices}, "", ""},
		{Pair{By: lab.IptablesNFT, Join: lab.Join{Kernel: true, Mode: "direct"}, Ways: both}, "10.1.0.2", "10.1.0.2"},
		{Pair{Mode: lab.Bridge, By: lab.IptablesNFT, Join: lab.Join{Kernel: true, Mode: "vxlan"}, Masquerade: true, Ways: both}, "10.1.0.2", "10.3.0.1"},
		{Pair{By: lab.MustangTC, Join: lab.Join{Mode: "vxlan", HostRouting: "ebpf"}, Ways: both}, "10.1.0.2", "10.1.0.2"},
	} {
		for _, v6 := range []bool{false, true} {
			c.p.Common, c.p.Label, c.p.Lab = Common{Binary: binary, MTU: 1500, IPv6: v6}, fmt.Sprintf("%s %+v", c.p.By, c.p.Join), fmt.Sprintf("pt%d%d", os.Getpid()%1000, i)
			seen := up(t, c.p)
			if len(seen) != max(1, len(c.p.Ways)) {
				t.Errorf("%s: paths %v", c.p.Label, seen)
			}
			for _, from := range seen {
				if a, err := netip.ParseAddr(from); err != nil || a.Is6() != v6 {
					t.Errorf("%s: the server sees %q", c.p.Label, from)
				}
			}
			if !v6 && c.pod != "" && (seen[report.PodIP] != c.pod || seen[ToNode] != c.node) {
				t.Errorf("%s: servers see %v, want the pod's %s and, at the node, %s", c.p.Label, seen, c.pod, c.node)
			}
		}
	}
}

func TestPodsOnTheWire(t *testing.T) {
	name := fmt.Sprintf("pw%d", os.Getpid()%1000)
	plain := OnWire{Common: Common{Binary: binary, MTU: 1500}, Label: "plain", Lab: name, Kind: report.Macvlan, By: lab.NoServices}
	if seen := up(t, plain); seen[report.PodIP] != "10.3.1.10" {
		t.Errorf("the server sees %v", seen)
	}
	works, err := ServiceWorks(plain).Find(t.Context(), runner.Launcher{}, "")
	if err != nil || works {
		t.Errorf("a Service of the node's iptables works for a pod on the wire: %v, %v", works, err)
	}
}

// Only a kernel without IPsec is no failure of the run.
func TestAKernelWithoutIPsecIsToldFromOtherErrors(t *testing.T) {
	for err, lacks := range map[error]bool{unix.EPROTONOSUPPORT: true, unix.ENOENT: true, unix.ENOSYS: true, unix.EPERM: false, unix.ENOMEM: false} {
		if got := ipsecError(fmt.Errorf("add: %w", err)); errors.Is(got, errors.ErrUnsupported) != lacks || !lacks && !errors.Is(got, err) {
			t.Errorf("%v: %v", err, got)
		}
	}
	if err := ipsecError(nil); err != nil {
		t.Error(err)
	}
}
