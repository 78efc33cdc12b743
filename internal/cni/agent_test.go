// SPDX-License-Identifier: Apache-2.0

package cni

// The plugin beside an agent: real processes, a real node. This test binary is
// plugin and agent, by its role.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/state"
)

const roleVariable = "MUSTANG_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "plugin":
		patience, _ = time.ParseDuration(os.Getenv("PATIENCE"))
		os.Exit(Main())
	case "agent":
		if err := beAgent(os.Getenv("CONDUCT")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// slowness is how long a slow agent takes to know labels.
const slowness = 400 * time.Millisecond

// beAgent holds the scope, and does with requests what conduct says.
func beAgent(conduct string) error {
	debug.SetGCPercent(-1) // no finalizer closes what was forgotten
	ctx := context.Background()
	scope := engine.Scope{BPFFS: os.Getenv("BPFFS"), StateDir: os.Getenv("STATE")}
	e, err := engine.Open(ctx, scope, engine.Options{Fed: conduct == "knows nothing yet"})
	if err != nil {
		return err
	}
	defer e.Close()
	var one sync.Mutex
	s := Server{
		BPFFS: scope.BPFFS,
		Engine: func(_ context.Context, fn func(*engine.Engine) error) error {
			one.Lock()
			defer one.Unlock()
			if conduct == "dies" {
				os.Exit(0)
			}
			return fn(e)
		},
		Labels: func(ctx context.Context, pod state.PodRef) (map[string]string, error) {
			if pod.Name == "unheard-of" {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			if conduct == "slow" { // and does not hear that nobody waits any more
				time.Sleep(slowness)
			}
			return map[string]string{"app": "label-of-" + pod.Name}, nil
		},
	}
	s.barred.Store(conduct == "barred")
	if conduct == "late" {
		fmt.Println("ready")
		time.Sleep(300 * time.Millisecond)
	}
	if conduct == "holds" {
		fmt.Println("ready")
		select {}
	}
	l, err := Listen(scope.StateDir)
	if err != nil {
		return err
	}
	if conduct != "late" {
		fmt.Println("ready")
	}
	if conduct == "hangs" {
		select {}
	}
	return s.Serve(ctx, l)
}

// world is a node with a container on it.
type world struct {
	t                        *testing.T
	node, container, dir     string
	patience, containerIface string
	id                       string // the container's
	agentPID                 int
	said                     []byte // by the last call
}

func newWorld(t *testing.T) *world {
	t.Helper()
	name := fmt.Sprintf("mstagent%d-%d", os.Getpid(), time.Now().UnixNano()%1e6)
	w := &world{t: t, node: name, container: name + "-c", dir: t.TempDir(), patience: "60s", containerIface: "eth0", id: "c1"}
	for _, ns := range []string{w.node, w.container} {
		w.ip("netns", "add", ns)
		t.Cleanup(func() { w.ip("netns", "del", ns) })
	}
	w.ip("-n", w.node, "link", "set", "lo", "up")
	if err := os.Mkdir(w.bpffs(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", w.bpffs(), "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(w.bpffs(), unix.MNT_DETACH) })
	return w
}

func (w *world) bpffs() string { return filepath.Join(w.dir, "bpf") }
func (w *world) state() string { return filepath.Join(w.dir, "state") }

func (w *world) ip(args ...string) string {
	w.t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		w.t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (w *world) self(role string, env ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", "--net=/var/run/netns/"+w.node, os.Args[0])
	cmd.Env = append(append(os.Environ(), roleVariable+"="+role, "PATIENCE="+w.patience,
		"BPFFS="+filepath.Join(w.bpffs(), "scope"), "STATE="+w.state()), env...)
	return cmd
}

// agent starts one, and returns when it is ready.
func (w *world) agent(conduct string) (stop func()) {
	w.t.Helper()
	cmd := w.self("agent", "CONDUCT="+conduct)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.agentPID = cmd.Process.Pid // nsenter has become it
	stop = sync.OnceFunc(func() { cmd.Process.Kill(); cmd.Wait() })
	w.t.Cleanup(stop)
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		w.t.Fatalf("the agent said %q: %v", line, err)
	}
	return stop
}

// config is the network's, with more.
func (w *world) config(more map[string]any) map[string]any {
	conf := map[string]any{"cniVersion": "1.1.0", "name": "net", "type": "mustang-cni", "mode": "veth", "mtu": 1500,
		"bpffs": filepath.Join(w.bpffs(), "scope"), "stateDir": w.state(),
		"ipam": map[string]any{"type": "mustang", "pools": []string{"10.9.0.0/24"}}}
	for k, v := range more {
		conf[k] = v
	}
	return conf
}

// call runs the plugin; the error is its answer's.
func (w *world) call(command string, more map[string]any, args ...string) *types.Error {
	w.t.Helper()
	conf := w.config(more)
	cmd := w.plugin(command, conf, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	err := cmd.Run()
	w.said = out.Bytes()
	if err == nil {
		return nil
	}
	e := &types.Error{}
	if err := json.Unmarshal(out.Bytes(), e); err != nil {
		w.t.Fatalf("%s answered %q: %v", command, out.String(), err)
	}
	return e
}

func (w *world) plugin(command string, conf map[string]any, args ...string) *exec.Cmd {
	w.t.Helper()
	text, err := json.Marshal(conf)
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := w.self("plugin", "CNI_COMMAND="+command, "CNI_CONTAINERID="+w.id, "CNI_NETNS=/var/run/netns/"+w.container,
		"CNI_IFNAME="+w.containerIface, "CNI_PATH=/nowhere", "CNI_ARGS="+strings.Join(args, ";"))
	cmd.Stdin = bytes.NewReader(text)
	return cmd
}

func (w *world) ok(e *types.Error) {
	w.t.Helper()
	if e != nil {
		w.t.Fatalf("code %d: %s %s", e.Code, e.Msg, e.Details)
	}
}

func (w *world) tryAgain(e *types.Error) {
	w.t.Helper()
	if e == nil || e.Code != types.ErrTryAgainLater || !strings.Contains(e.Msg, "try again") {
		w.t.Fatalf("got %v, want code 11", e)
	}
}

// endpoints are the records in the store.
func (w *world) endpoints() (out []state.Endpoint) {
	w.t.Helper()
	files, _ := filepath.Glob(filepath.Join(w.state(), "endpoints", "*.json"))
	for _, f := range files {
		var ep state.Endpoint
		text, err := os.ReadFile(f)
		if err == nil {
			err = json.Unmarshal(text, &ep)
		}
		if err != nil {
			w.t.Fatal(err)
		}
		out = append(out, ep)
	}
	return out
}

// nothingLeft wants no interface, record or address of the container.
func (w *world) nothingLeft() {
	w.t.Helper()
	left, _ := filepath.Glob(filepath.Join(w.state(), "cni", "*", "*"))
	for _, f := range left {
		if !strings.Contains(f, "/last-") && !strings.Contains(f, "/looked-") {
			w.t.Errorf("left behind: %s", f)
		}
	}
	if eps := w.endpoints(); len(eps) > 0 {
		w.t.Errorf("left behind: %+v", eps)
	}
	out := w.ip("-n", w.node, "-o", "link")
	if strings.Contains(strings.ReplaceAll(out, "mst-br0", "the node's own bridge"), "mst") {
		w.t.Errorf("left behind: %s", out)
	}
	if out := w.ip("-n", w.container, "-o", "link"); strings.Contains(out, "eth0") {
		w.t.Errorf("left behind: %s", out)
	}
}

var podArgs = []string{"IgnoreUnknown=1", "K8S_POD_NAMESPACE=prod", "K8S_POD_NAME=web", "K8S_POD_UID=1234"}

func TestAgentDoesWhatNeedsTheEngine(t *testing.T) {
	w := newWorld(t)
	w.agent("serves")
	w.ok(w.call("STATUS", nil))
	w.ok(w.call("ADD", nil, podArgs...))
	eps := w.endpoints()
	if len(eps) != 1 || eps[0].Labels["app"] != "label-of-web" || eps[0].Pod != (state.PodRef{Namespace: "prod", Name: "web", UID: "1234"}) {
		t.Errorf("endpoints: %+v", eps)
	}
	w.ok(w.call("GC", map[string]any{"cni.dev/valid-attachments": []any{map[string]any{"containerID": "c1", "ifname": "eth0"}}}))
	if len(w.endpoints()) != 1 {
		t.Error("GC removed what is valid")
	}
	w.ok(w.call("DEL", nil))
	w.nothingLeft()
	w.ok(w.call("DEL", nil))
	w.ok(w.call("ADD", nil, podArgs...))
	w.ok(w.call("GC", map[string]any{"cni.dev/valid-attachments": []any{}}))
	w.nothingLeft()
}

func TestWithoutAnAgentThePodIsRecordedAllTheSame(t *testing.T) {
	w := newWorld(t)
	w.ok(w.call("ADD", nil, podArgs...))
	eps := w.endpoints()
	if len(eps) != 1 || eps[0].Pod != (state.PodRef{Namespace: "prod", Name: "web", UID: "1234"}) || len(eps[0].Labels) > 0 {
		t.Errorf("endpoints: %+v", eps)
	}
	w.ok(w.call("DEL", nil))
	w.nothingLeft()
}

// A network with another bpffs than the agent's would not work without the agent, and is refused by it. What was added
// before is removed all the same, as by a runtime that keeps the network's list of then.
func TestANetworkWithAnotherBPFFSIsRefused(t *testing.T) {
	w := newWorld(t)
	stop := w.agent("serves")
	other := map[string]any{"bpffs": filepath.Join(w.bpffs(), "other")}
	e := w.call("ADD", other, podArgs...)
	if e == nil || e.Code != types.ErrInvalidNetworkConfig || !strings.Contains(e.Msg, "works on "+filepath.Join(w.bpffs(), "scope")) {
		t.Fatalf("ADD beside an agent: %v", e)
	}
	w.nothingLeft()
	w.ok(w.call("ADD", nil, podArgs...))
	w.ok(w.call("DEL", other))
	w.ok(w.call("ADD", nil, podArgs...))
	stop()
	for _, command := range []string{"STATUS", "DEL"} {
		if e := w.call(command, other); e == nil || !strings.Contains(e.Msg+e.Details, "is the state directory of "+filepath.Join(w.bpffs(), "scope")) {
			t.Errorf("%s without one: %v", command, e)
		}
	}
	if eps := w.endpoints(); len(eps) != 1 {
		t.Errorf("%+v", eps)
	}
	w.ok(w.call("DEL", nil))
	w.nothingLeft()
}

// After a boot the kubelet makes the state directory, open to all, and an ADD is the first to write there.
func TestTheStateDirectoryIsRootsAloneAfterAnADD(t *testing.T) {
	w := newWorld(t)
	if err := errors.Join(os.Mkdir(w.state(), 0o755), os.Chmod(w.state(), 0o755)); err != nil {
		t.Fatal(err)
	}
	w.ok(w.call("ADD", nil, podArgs...))
	if st, err := os.Stat(w.state()); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the state directory: %v, %v; want it closed to others", st.Mode(), err)
	}
	w.ok(w.call("DEL", nil))
}

func TestADDWaitsForAnAgentThatStarts(t *testing.T) {
	w := newWorld(t)
	w.agent("late")
	w.ok(w.call("ADD", nil, podArgs...))
	if eps := w.endpoints(); len(eps) != 1 || eps[0].Labels["app"] != "label-of-web" {
		t.Errorf("the agent was not asked: %+v", eps)
	}
}

func TestADDFailsWithTryAgain(t *testing.T) {
	for conduct, args := range map[string][]string{"holds": podArgs, "hangs": podArgs, "dies": podArgs, "serves": {"K8S_POD_NAMESPACE=prod", "K8S_POD_NAME=unheard-of"}} {
		t.Run(conduct, func(t *testing.T) {
			w := newWorld(t)
			enough := w.patience
			w.patience = "1500ms"
			stop := w.agent(conduct)
			w.tryAgain(w.call("ADD", nil, args...))
			if out := w.ip("-n", w.container, "-o", "link"); strings.Contains(out, "eth0") {
				t.Errorf("the failed ADD left its interface: %s", out)
			}
			stop()
			w.patience = enough
			w.ok(w.call("DEL", nil)) // also with the socket of a dead agent there
			w.nothingLeft()
			w.ok(w.call("ADD", nil, args...))
		})
	}
}

func TestSocketIsItsOwnersAlone(t *testing.T) {
	before := goleak.IgnoreCurrent()
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	l, err := Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(SocketPath(dir))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("the socket: %v, %v", st, err)
	}
	var asked atomic.Bool
	s := Server{Engine: func(context.Context, func(*engine.Engine) error) error { asked.Store(true); return nil }}
	served := make(chan error)
	go func() { served <- s.Serve(ctx, l) }()
	// Wider permissions by mistake: another user is refused all the same.
	for _, step := range []error{os.Chmod(SocketPath(dir), 0o666), os.Chmod(dir, 0o777), os.Chmod(filepath.Dir(dir), 0o777)} {
		if step != nil {
			t.Fatal(step)
		}
	}
	if err := askAs(65534, SocketPath(dir)); err == nil || asked.Load() {
		t.Errorf("another user was served: %v, %t", err, asked.Load())
	}
	if err := askAs(0, SocketPath(dir)); err != nil || !asked.Load() {
		t.Errorf("root was not served: %v", err)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	goleak.VerifyNone(t, before)
}

// askAs makes a request from a thread of user uid, and wants an answer.
func askAs(uid int, path string) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		done <- func() error {
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); e != 0 {
				return e
			}
			c, err := net.Dial("unix", path)
			if err != nil {
				return err
			}
			defer c.Close()
			text := fmt.Sprintf(`{"op":"status","deadline":%q}`, time.Now().Add(time.Minute).Format(time.RFC3339Nano))
			if _, err := c.Write([]byte(text)); err != nil {
				return err
			}
			var r response
			return errors.Join(json.NewDecoder(c).Decode(&r), r.err())
		}()
	}()
	return <-done
}

func TestErrorsKeepTheirKindAcrossTheSocket(t *testing.T) {
	for _, err := range []error{
		fmt.Errorf("endpoint 3: %w", engine.ErrNotFound),
		fmt.Errorf("the other end %w", engine.ErrElsewhere),
		fmt.Errorf("eth0 %w: 3", engine.ErrExists),
		fmt.Errorf("wrapped: %w", types.NewError(11, "later", "")),
		errors.New("plain"),
	} {
		text, jsonErr := json.Marshal(responseOf(state.Endpoint{}, err))
		var r response
		if jsonErr = errors.Join(jsonErr, json.Unmarshal(text, &r)); jsonErr != nil {
			t.Fatal(jsonErr)
		}
		got := r.err()
		if got.Error() != err.Error() || errors.Is(got, engine.ErrNotFound) != errors.Is(err, engine.ErrNotFound) ||
			errors.Is(got, engine.ErrExists) != errors.Is(err, engine.ErrExists) ||
			errors.Is(got, engine.ErrElsewhere) != errors.Is(err, engine.ErrElsewhere) {
			t.Errorf("%v became %v", err, got)
		}
		var a, b *types.Error
		if errors.As(err, &a) != errors.As(got, &b) || a != nil && a.Code != b.Code {
			t.Errorf("%v lost its code: %v", err, got)
		}
	}
}
