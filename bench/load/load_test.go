// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/bench/cpu"
)

// The load program must be a process of its own, so the test binary becomes it.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "bench-load" {
		if err := Main(os.Args[2:], os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func command(t *testing.T, args []string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], append([]string{"bench-load"}, args...)...)
	cmd.WaitDelay = time.Second
	return cmd
}

// freeAddr returns an address that nothing listens on.
func freeAddr(t *testing.T, host string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Skipf("no %s here: %v", host, err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String())
}

func options(mode Mode, addr netip.AddrPort) Options {
	return Options{Mode: mode, Addr: addr, Place: Place{CPU: -1}, Duration: 150 * time.Millisecond,
		Warmup: 20 * time.Millisecond, Timeout: 5 * time.Second}
}

// startServer starts a server and returns once it listens.
func startServer(t *testing.T, o Options) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	o.Server = true
	cmd := command(t, o.Args())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	r := bufio.NewReader(out)
	line, err := r.ReadString('\n')
	if err != nil || strings.TrimSpace(line) != Ready {
		t.Fatalf("server said %q, %v", line, err)
	}
	return cmd, r
}

func result(t *testing.T, line []byte) Result {
	t.Helper()
	var r Result
	if err := json.Unmarshal(line, &r); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return r
}

func TestEveryModeCarriesTraffic(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		for _, mode := range []Mode{Stream, RR, CRR, UDPRR} {
			t.Run(string(mode)+" "+host, func(t *testing.T) {
				o := options(mode, freeAddr(t, host))
				_, server := startServer(t, o)
				out, err := command(t, o.Args()).Output()
				if err != nil {
					t.Fatalf("client: %v: %s", err, err.(*exec.ExitError).Stderr)
				}
				r := result(t, out)
				if mode == Stream {
					line, err := server.ReadBytes('\n')
					if err != nil {
						t.Fatal(err)
					}
					r = result(t, line) // bytes count at the receiver
				} else if r.Latency == nil || r.Latency.P50 <= 0 || r.Latency.P50 > r.Latency.Max {
					t.Errorf("latency %+v", r.Latency)
				}
				if r.Count == 0 || r.Bytes == 0 || r.Seconds <= 0 {
					t.Errorf("empty result: %+v", r)
				}
			})
		}
	}
}

func TestClientWithoutServerFailsByItsDeadline(t *testing.T) {
	// A UDP socket that nobody answers is what a dead datapath looks like.
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	o := options(UDPRR, netip.MustParseAddrPort(silent.LocalAddr().String()))
	o.Timeout = 300 * time.Millisecond
	cmd := command(t, o.Args())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err == nil {
		t.Fatal("no error without an answer")
	}
	if !strings.Contains(stderr.String(), "timed out") {
		t.Errorf("the error does not say what happened: %s", stderr.String())
	}
}

func TestArgsRoundTrip(t *testing.T) {
	want := Options{
		Server: true, Mode: CRR, Addr: netip.MustParseAddrPort("[fd00::1]:5201"),
		Place:    Place{Netns: "/proc/1/fd/3", CPU: 1, Cgroups: []string{"/sys/fs/cgroup/x", "/sys/fs/cgroup/y"}},
		Duration: time.Second, Warmup: time.Millisecond, Timeout: 2 * time.Second, CC: "cubic",
		CPU: cpu.Source{Kind: cpu.CPUStat, Dir: "/sys/fs/cgroup/x", Softirqd: []int{14, 22}},
	}
	got, err := parse(want.Args())
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(want, got) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestParseRefusesWhatItDoesNotKnow(t *testing.T) {
	for _, args := range [][]string{nil, {"dance"}, {"client", "--mode", "x", "--addr", "1.1.1.1:1"}, {"client", "--addr", "nowhere"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("%q was accepted", args)
		}
	}
}
