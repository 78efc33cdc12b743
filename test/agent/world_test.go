// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

const (
	nodeName   = "n1"
	serverPort = 8080
	health     = "127.0.0.1:10256"
	metrics    = "127.0.0.1:10249"

	patience = time.Minute // with what hangs
)

// world is a node with pods, an API server beside it, and an agent.
type world struct {
	t      *testing.T
	lab    *lab.Lab
	api    *kube.APIServer
	config string // of an agent with the rights that docs/agent.md lists
	log    *os.File

	client  *lab.Pod
	servers []*lab.Pod

	agent *process // of all copies of a world, whichever subtest starts or ends it
}

// process is an agent that was started.
type process struct {
	cmd   *lab.Cmd // nil: none runs
	ended chan error
}

// newWorld is newNode with an agent, a client's pod and servers' pods.
func newWorld(t *testing.T, servers int) *world {
	t.Helper()
	w := newNode(t)
	w.begin(servers)
	return w
}

// newNode skips with the reason where an API server cannot start.
func newNode(t *testing.T) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("an API server and its clients take minutes: not in short mode")
	}
	if os.Geteuid() != 0 {
		t.Skip("network namespaces and BPF need root")
	}
	if missing, err := kube.MissingAPIServer(); err != nil || missing != "" {
		t.Skipf("not built yet: %s (%v); to build (12 minutes, once): test/kube/kube build", missing, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 6*time.Minute)
	defer cancel()
	l, err := lab.New(ctx, lab.Config{
		Name: fmt.Sprintf("a%d", os.Getpid()%100000), Mode: lab.Veth, Services: lab.MustangTC, Binary: tool,
	})
	must(t, err)
	w := &world{t: t, lab: l, agent: &process{}}
	t.Cleanup(func() { check(t, l.Close()) })
	dir := t.TempDir()
	w.api, err = kube.StartAPIServer(ctx, l.Node().NetNS, dir)
	must(t, err)
	t.Cleanup(w.api.Close)
	w.log, err = os.Create(filepath.Join(dir, "agent.log"))
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(w.log.Name())
			t.Logf("the agent's log:\n%s", text)
		}
		w.log.Close()
	})
	w.rights(ctx)
	w.node(nodeName)
	return w
}

// begin starts the agent, and makes pods.
func (w *world) begin(servers int) {
	w.t.Helper()
	w.startAgent()
	w.t.Cleanup(w.stopAgent)
	w.synced()
	w.client = w.pod(w.t.Context(), "client")
	for i := range servers {
		p := w.pod(w.t.Context(), fmt.Sprintf("s%d", i))
		w.serve(p)
		w.servers = append(w.servers, p)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// rights gives the agent what docs/agent.md lists, and nothing else.
func (w *world) rights(ctx context.Context) {
	w.t.Helper()
	var err error
	w.config, err = w.api.KubeconfigFor("mustang-agent", "")
	must(w.t, err)
	watch := []string{"list", "watch"}
	role := rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "mustang-agent"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"services", "nodes", "pods", "namespaces"}, Verbs: watch},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: watch},
		{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"networkpolicies"}, Verbs: watch},
		{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create"}},
	}}
	binding := rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "mustang-agent"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "mustang-agent"},
		Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "mustang-agent"}},
	}
	must(w.t, w.api.Do(ctx, http.MethodPost, "/apis/rbac.authorization.k8s.io/v1/clusterroles", role, nil))
	must(w.t, w.api.Do(ctx, http.MethodPost, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding, nil))
}

func (w *world) node(name string) {
	w.t.Helper()
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	must(w.t, w.api.Do(context.Background(), http.MethodPost, "/api/v1/nodes", n, nil))
}

func (w *world) startAgent() {
	w.t.Helper()
	cmd := w.lab.Node().Command(context.Background(), w.lab.MustangArgs("agent", "--kubeconfig", w.config, "--node", nodeName,
		"--node-mode", "none", "--health-address", health, "--metrics-address", metrics)...)
	cmd.Stdout, cmd.Stderr = w.log, w.log
	must(w.t, cmd.Start())
	ended := make(chan error, 1)
	*w.agent = process{cmd, ended}
	go func() { ended <- cmd.Wait() }()
}

// stopAgent ends the agent as its service manager would.
func (w *world) stopAgent() {
	w.t.Helper()
	if w.agent.cmd == nil {
		return
	}
	check(w.t, w.agent.cmd.Process.Signal(os.Interrupt))
	select {
	case err := <-w.agent.ended:
		check(w.t, err)
		*w.agent = process{}
	case <-time.After(patience):
		w.t.Error("the agent does not end")
		w.killAgent()
	}
}

// killAgent ends it in the middle of whatever it does.
func (w *world) killAgent() {
	w.t.Helper()
	if w.agent.cmd == nil {
		w.t.Fatal("no agent runs")
	}
	_ = w.agent.cmd.Process.Kill()
	<-w.agent.ended
	*w.agent = process{}
}

func (w *world) pod(ctx context.Context, name string, flags ...string) *lab.Pod {
	w.t.Helper()
	p, err := w.lab.Node().AddPod(ctx, name, flags...)
	must(w.t, err)
	return p
}

// serve answers each line on TCP, and each datagram, with the pod's name and
// what was sent.
func (w *world) serve(p *lab.Pod) {
	w.t.Helper()
	var tcp net.Listener
	var udp net.PacketConn
	address := fmt.Sprintf("[::]:%d", serverPort)
	must(w.t, p.Do(func() (err error) {
		if tcp, err = net.Listen("tcp", address); err == nil {
			udp, err = net.ListenPacket("udp", address)
		}
		return err
	}))
	var wg sync.WaitGroup
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	w.t.Cleanup(func() {
		tcp.Close()
		udp.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = true
			mu.Unlock()
			wg.Go(func() {
				for lines := bufio.NewScanner(c); lines.Scan(); {
					fmt.Fprintf(c, "%s %s\n", p.Name, lines.Text())
				}
				c.Close()
				mu.Lock()
				delete(open, c)
				mu.Unlock()
			})
		}
	})
	wg.Go(func() {
		buf := make([]byte, 2000)
		for {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo([]byte(p.Name+" "+string(buf[:n])+"\n"), from)
		}
	})
}

// dial connects from the client's pod.
func (w *world) dial(network string, to netip.AddrPort, wait time.Duration) (conn net.Conn, err error) {
	err = w.client.Do(func() error {
		conn, err = net.DialTimeout(network, to.String(), wait)
		return err
	})
	return conn, err
}

// ask opens a connection and says who answers.
func (w *world) ask(network string, to netip.AddrPort) (string, error) {
	return w.askWithin(network, to, 10*time.Second)
}

// askWithin is ask with a limit for all of it.
func (w *world) askWithin(network string, to netip.AddrPort, limit time.Duration) (string, error) {
	deadline := time.Now().Add(limit)
	c, err := w.dial(network, to, limit)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return whoUntil(c, deadline)
}

func who(c net.Conn) (string, error) { return whoUntil(c, time.Now().Add(2*time.Second)) }

func whoUntil(c net.Conn, deadline time.Time) (string, error) {
	if err := c.SetDeadline(deadline); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, "hello\n"); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	name, _, _ := strings.Cut(line, " ")
	return name, err
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(2 * patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if err = ok(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// answersBy waits until connections are answered by exactly these pods.
func (w *world) answersBy(network string, to netip.AddrPort, pods ...*lab.Pod) {
	w.t.Helper()
	var want []string
	for _, p := range pods {
		want = append(want, p.Name)
	}
	slices.Sort(want)
	eventually(w.t, fmt.Sprintf("%s %s is answered by %v", network, to, want), func() error {
		seen := map[string]bool{}
		for range 32 * len(pods) { // of two that still answer, one is met alone once in 2^32 times
			name, err := w.ask(network, to)
			if err != nil {
				return err
			}
			if !slices.Contains(want, name) {
				return fmt.Errorf("%s answers", name)
			}
			seen[name] = true
		}
		if len(seen) != len(pods) {
			return fmt.Errorf("only %v answer", seen)
		}
		return nil
	})
}

// mustang runs the tool in the node, and gives what it prints and its exit status.
func (w *world) mustang(stdin string, args ...string) (out, errs string, code int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*patience)
	defer cancel()
	c := w.lab.Node().Command(ctx, w.lab.MustangArgs(args...)...)
	var o, e bytes.Buffer
	c.Stdout, c.Stderr, c.Stdin = &o, &e, strings.NewReader(stdin)
	if err := c.Run(); err != nil && c.ProcessState == nil {
		w.t.Fatal(err)
	}
	return o.String(), e.String(), c.ProcessState.ExitCode()
}

// listed is one line of `mustang svc ls -o json`.
type listed struct {
	Protocol string   `json:"protocol"`
	Service  string   `json:"service"`
	Port     uint16   `json:"port"`
	Backends []string `json:"backends"`
	Owner    string   `json:"owner"`
}

func (w *world) services() []listed {
	w.t.Helper()
	out, errs, code := w.mustang("", "svc", "ls", "-o", "json")
	if code != 0 {
		w.t.Fatalf("svc ls: status %d: %s", code, errs)
	}
	var list []listed
	must(w.t, json.Unmarshal([]byte(out), &list))
	// The API server makes a Service for itself.
	return slices.DeleteFunc(list, func(s listed) bool { return s.Service == "10.96.0.1" })
}

// get asks the agent's own servers.
func (w *world) get(address, path string) (code int, body string, err error) {
	client := http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
			err = w.lab.Node().Do(func() error {
				var d net.Dialer
				conn, err = d.DialContext(ctx, network, addr)
				return err
			})
			return conn, err
		},
	}}
	resp, err := client.Get("http://" + address + path)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// synced waits until the agent says that it is well.
func (w *world) synced() {
	w.t.Helper()
	eventually(w.t, "the agent is healthy", func() error {
		code, body, err := w.get(health, "/healthz")
		if err == nil && code != http.StatusOK {
			err = errors.New(body)
		}
		return err
	})
}
