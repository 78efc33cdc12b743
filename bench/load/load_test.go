// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/bench/cpu"
)

// The load program must be a process of its own, so the test binary becomes it.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "bench-load" {
		if err := Main(os.Args[2:], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// loadProcess is a load with its ends.
type loadProcess struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	lines  *bufio.Reader
	stderr bytes.Buffer
}

// start starts one side and returns once it is ready.
func start(t *testing.T, o Options) *loadProcess {
	t.Helper()
	p := &loadProcess{cmd: exec.CommandContext(t.Context(), os.Args[0], append([]string{"bench-load"}, o.Args()...)...)}
	p.cmd.WaitDelay = time.Second
	p.cmd.Stderr = &p.stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill(); _ = p.cmd.Wait() })
	p.lines = bufio.NewReader(out)
	if line, err := p.lines.ReadString('\n'); err != nil || strings.TrimSpace(line) != Ready {
		t.Fatalf("%v said %q, %v: %s", o.Args(), line, err, &p.stderr)
	}
	return p
}

// end closes the input and returns the last line.
func (p *loadProcess) end(t *testing.T) []byte {
	t.Helper()
	p.stdin.Close()
	out, _ := io.ReadAll(p.lines)
	if err := p.cmd.Wait(); err != nil {
		t.Fatalf("%v: %v: %s", p.cmd.Args, err, &p.stderr)
	}
	return out
}

func decode[T any](t *testing.T, line []byte) (v T) {
	t.Helper()
	if err := json.Unmarshal(line, &v); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return v
}

// turn asks for a turn.
func (p *loadProcess) turn(t *testing.T) Turn {
	t.Helper()
	fmt.Fprintln(p.stdin)
	line, err := p.lines.ReadBytes('\n')
	if err != nil {
		t.Fatalf("no turn: %v: %s", err, &p.stderr)
	}
	return decode[Turn](t, line)
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

func options(mode Mode, addr netip.AddrPort) (server, client Options) {
	scenario, err := ParseScenario(string(mode))
	if err != nil {
		panic(err)
	}
	client = Options{Scenario: scenario, Addr: addr, Place: Place{CPU: -1}, Duration: 20 * time.Millisecond,
		Warmup: 2 * time.Millisecond, Timeout: 5 * time.Second}
	server = client
	server.Server = true
	return server, client
}

func TestEveryModeTakesTurns(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		for _, mode := range []Mode{Stream, RR, CRR, UDPRR, "stream:64", "rr:65536", "stream*8", "rr*8", "crr*8", "rr:1440*3"} {
			t.Run(string(mode)+" "+host, func(t *testing.T) {
				so, co := options(mode, freeAddr(t, host))
				server := start(t, so)
				client := start(t, co)
				var sum Turn
				for range 3 {
					one := client.turn(t)
					if one.Count == 0 || one.Bytes == 0 || one.Seconds < co.Duration.Seconds() || one.All < one.Count {
						t.Errorf("empty turn: %+v", one)
					}
					sum.add(one)
				}
				r := decode[Result](t, client.end(t))
				if r.Turn != sum {
					t.Errorf("the sum of the turns is %+v, the result %+v", sum, r.Turn)
				}
				if co.Mode != Stream && (r.Latency == nil || r.Latency.P50 <= 0 || r.Latency.P50 > r.Latency.Max) {
					t.Errorf("latency %+v", r.Latency)
				}
				server.end(t)
			})
		}
	}
}

// switches counts how often the threads of a process were put on a CPU.
func switches(t *testing.T, pid int) (n int64) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		t.Fatalf("no threads of %d: %v", pid, err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		fields := strings.Fields(string(b))
		times, err := strconv.ParseInt(fields[2], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		n += times
	}
	return n
}

// A load whose turn it is not must not disturb the one whose turn it is.
func TestBothSidesSleepBetweenTurns(t *testing.T) {
	for _, mode := range []Mode{Stream, RR, CRR, UDPRR} {
		so, co := options(mode, freeAddr(t, "127.0.0.1"))
		server := start(t, so)
		client := start(t, co)
		client.turn(t)
		for _, p := range []*loadProcess{server, client} {
			// The Go runtime goes to sleep after the load; wait for that.
			var before int64
			for deadline := time.Now().Add(5 * time.Second); ; {
				before = switches(t, p.cmd.Process.Pid)
				time.Sleep(200 * time.Millisecond)
				if switches(t, p.cmd.Process.Pid) == before {
					break
				}
				if time.Now().After(deadline) {
					t.Errorf("%s: %v does not come to rest", mode, p.cmd.Args[2])
					break
				}
			}
		}
		if one := client.turn(t); one.Count == 0 {
			t.Errorf("%s: no turn after a rest", mode)
		}
		client.end(t)
		server.end(t)
	}
}

func TestStreamCountsWhatTheReceiverHasRead(t *testing.T) {
	// A receiver that reads 1 MB/s: what lies in buffers must not count.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, co := options(Stream, netip.MustParseAddrPort(l.Addr().String()))
	co.Warmup = 0
	client := start(t, co)
	read := make(chan int64, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		buf := make([]byte, 64<<10)
		var n int64
		for {
			k, err := conn.Read(buf)
			if err != nil {
				return
			}
			n += int64(k)
			if buf[k-1] == rest {
				read <- n
				_, _ = conn.Write(buf[:1])
			}
			time.Sleep(time.Duration(k) * time.Microsecond / 4)
		}
	}()
	one := client.turn(t)
	if got := <-read; got != one.Bytes {
		t.Errorf("%d bytes count, the receiver read %d", one.Bytes, got)
	}
	if rate := float64(one.Bytes) / one.Seconds; rate > 4.5e6 {
		t.Errorf("%.0f bytes/s of a receiver that reads 4,000,000", rate)
	}
}

func TestSlowedClientIsSlower(t *testing.T) {
	for _, mode := range []Mode{Stream, RR, CRR} {
		so, co := options(mode, freeAddr(t, "127.0.0.1"))
		so.Place.CPU, co.Place.CPU = 0, 0 // across CPUs a wake-up costs more than the path
		start(t, so)
		plain := start(t, co)
		// A server serves one client, but for CRR.
		so.Addr, co.Addr = freeAddr(t, "127.0.0.1"), netip.AddrPort{}
		co.Addr, co.Slow = so.Addr, 0.4
		start(t, so)
		slow := start(t, co)
		var ratios []float64
		for range 41 {
			a, b := slow.turn(t), plain.turn(t)
			ratios = append(ratios, float64(a.Count)/a.Seconds/(float64(b.Count)/b.Seconds))
		}
		slices.Sort(ratios)
		// On a busy machine who takes longer is also preempted more often: no lower bound holds.
		if got := ratios[20]; got > 0.85 {
			t.Errorf("%s: slowed by 40 %%, the client has %.2f of its rate", mode, got)
		}
	}
}

func TestTailCountsFromWhenARequestWasDue(t *testing.T) {
	// A server that stalls for 100 ms once: every request that was due meanwhile
	// waited, not only the one that met it.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, o := options(Tail, netip.MustParseAddrPort(l.Addr().String()))
	o.Rate, o.Duration, o.Warmup = 1000, 200*time.Millisecond, 0
	client := start(t, o)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		buf := make([]byte, 1)
		for i := 0; ; i++ {
			if _, err := conn.Read(buf); err != nil {
				return
			}
			if i == 20 {
				time.Sleep(100 * time.Millisecond)
			}
			_, _ = conn.Write(buf)
		}
	}()
	one := client.turn(t)
	if one.Count != 200 {
		t.Errorf("%d requests in 200 ms at 1000/s", one.Count)
	}
	r := decode[Result](t, client.end(t))
	if r.Latency == nil || r.Latency.Max < 99e6 || r.Latency.P90 < 60e6 {
		t.Errorf("the stall of half the time shows itself as %+v", r.Latency)
	}
}

func TestServerEndsWithItsInput(t *testing.T) {
	for _, mode := range []Mode{Stream, RR, CRR, UDPRR} {
		so, _ := options(mode, freeAddr(t, "127.0.0.1"))
		start(t, so).end(t) // before any client
	}
}

func TestClientWithoutAnswerFailsByItsDeadline(t *testing.T) {
	// A UDP socket that nobody answers is what a dead datapath looks like.
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	_, o := options(UDPRR, netip.MustParseAddrPort(silent.LocalAddr().String()))
	o.Timeout = 300 * time.Millisecond
	p := start(t, o)
	fmt.Fprintln(p.stdin)
	if _, err := io.ReadAll(p.lines); err != nil {
		t.Fatal(err)
	}
	if p.cmd.Wait() == nil || !strings.Contains(p.stderr.String(), "timed out") {
		t.Errorf("the error does not say what happened: %s", &p.stderr)
	}
}

func TestArgsRoundTrip(t *testing.T) {
	want := Options{
		Server: true, Scenario: Scenario{Mode: RR, Size: 1440, Flows: 32}, Addr: netip.MustParseAddrPort("[fd00::1]:5201"),
		Place:    Place{Netns: "/proc/1/fd/3", CPU: 1, Cgroups: []string{"/sys/fs/cgroup/x", "/sys/fs/cgroup/y"}},
		Duration: time.Second, Warmup: time.Millisecond, Timeout: 2 * time.Second, CC: "cubic",
		Slow: 0.05, Rate: 100,
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
	for _, args := range [][]string{nil, {"dance"}, {"client", "--mode", "x", "--addr", "1.1.1.1:1"}, {"client", "--addr", "nowhere"},
		{"client", "--mode", "tail", "--addr", "1.1.1.1:1"}, {"client", "--mode", "crr:64", "--addr", "1.1.1.1:1"},
		{"client", "--mode", "rr*0", "--addr", "1.1.1.1:1"}, {"client", "--mode", "udp-rr*2", "--addr", "1.1.1.1:1"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("%q was accepted", args)
		}
	}
}

// An answer that comes after its message was sent again is not taken for another's.
func TestALateAnswerLeavesOneRequestUnderWay(t *testing.T) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		buf := make([]byte, 64)
		for late := udpRetry + udpRetry/2; ; late = 0 {
			n, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			time.Sleep(late)
			_, _ = server.WriteTo(buf[:n], from)
		}
	}()
	c, err := newClient(Options{Scenario: Scenario{Mode: UDPRR}, Addr: netip.MustParseAddrPort(server.LocalAddr().String()), Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer rawClose(c.fd)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3)) // raw calls hold one
	runtime.LockOSThread()                          // it ends with the test
	if err := holdOffPreemption(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := c.request(more); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(50 * time.Millisecond) // for an answer that nobody waits for
	if _, _, err := unix.Recvfrom(c.fd, make([]byte, 64), unix.MSG_DONTWAIT); err != unix.EAGAIN || c.r.Lost != 1 {
		t.Errorf("an answer is left (%v), %d were sent again", err, c.r.Lost)
	}
}

// Programs that are not ours get the congestion control of ours.
func TestOtherProgramsRunWithTheLoadsCongestionControl(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread() // it ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	place := Place{Netns: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd()), CPU: -1}
	args := place.ExecArgs("reno", "cat", "/proc/sys/net/ipv4/tcp_congestion_control")
	out, err := exec.Command(os.Args[0], append([]string{"bench-load"}, args...)...).CombinedOutput()
	if got := strings.TrimSpace(string(out)); err != nil || got != "reno" {
		t.Errorf("%q: %v", got, err)
	}
}
