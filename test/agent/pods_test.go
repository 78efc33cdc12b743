// SPDX-License-Identifier: Apache-2.0

package agent_test

// Pods of a real API server that the CNI plugin connects, and who reaches whom.

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
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/lab"
)

// kubePod is a pod of the API server, with an interface by the CNI plugin.
type kubePod struct {
	*lab.Pod
	namespace string
	labels    map[string]string
}

// kubePod is a pod with a namespace that nothing is in yet.
func (w *world) kubePod(namespace, name string) *kubePod {
	w.t.Helper()
	ns := "mst-" + w.lab.Name() + "-" + namespace + "-" + name // so that who is killed leaves it to the next lab to clear away
	if out, err := exec.Command("ip", "netns", "add", ns).CombinedOutput(); err != nil {
		w.t.Fatalf("%v: %s", err, out)
	}
	w.t.Cleanup(func() {
		if out, err := exec.Command("ip", "netns", "del", ns).CombinedOutput(); err != nil {
			w.t.Errorf("%v: %s", err, out)
		}
	})
	return &kubePod{
		Pod:       &lab.Pod{Space: lab.Space{NetNS: "/var/run/netns/" + ns}, Name: name},
		namespace: namespace, labels: map[string]string{"app": name},
	}
}

func podsPath(namespace string) string { return "/api/v1/namespaces/" + namespace + "/pods" }

func (w *world) namespace(name string, labels ...string) {
	w.t.Helper()
	n := corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labels[0]: labels[1]}}}
	err := w.api.Do(context.Background(), http.MethodPost, "/api/v1/namespaces", n, nil)
	if err != nil {
		err = w.api.Do(context.Background(), http.MethodPut, "/api/v1/namespaces/"+name, n, nil)
	}
	must(w.t, err)
}

// createPod tells the API server of a pod on this node.
func (w *world) createPod(p *kubePod) {
	w.t.Helper()
	no := false
	object := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.namespace, Labels: p.labels},
		Spec: corev1.PodSpec{
			NodeName: nodeName, AutomountServiceAccountToken: &no,
			Containers: []corev1.Container{{Name: "c", Image: "i", Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: serverPort}}}},
		},
	}
	must(w.t, w.api.Do(context.Background(), http.MethodPost, podsPath(p.namespace), object, nil))
}

// relabel replaces a pod's labels in the API server.
func (w *world) relabel(p *kubePod, labels map[string]string) {
	w.t.Helper()
	var object corev1.Pod
	path := podsPath(p.namespace) + "/" + p.Name
	must(w.t, w.api.Do(context.Background(), http.MethodGet, path, nil, &object))
	object.Labels = labels
	must(w.t, w.api.Do(context.Background(), http.MethodPut, path, object, nil))
}

func (w *world) deletePod(p *kubePod) {
	w.t.Helper()
	zero := int64(0)
	must(w.t, w.api.Do(context.Background(), http.MethodDelete, podsPath(p.namespace)+"/"+p.Name, metav1.DeleteOptions{GracePeriodSeconds: &zero}, nil))
}

// drain makes a pod that has p's addresses, and that is being deleted.
func (w *world) drain(name string, p *lab.Pod) {
	w.t.Helper()
	path, no, long := podsPath("default")+"/"+name, false, int64(3600)
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		NodeName: nodeName, AutomountServiceAccountToken: &no, Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	must(w.t, w.api.Do(context.Background(), http.MethodPost, podsPath("default"), pod, &pod))
	pod.Status.PodIP = p.IPv4.String()
	pod.Status.PodIPs = []corev1.PodIP{{IP: p.IPv4.String()}, {IP: p.IPv6.String()}}
	must(w.t, w.api.Do(context.Background(), http.MethodPut, path+"/status", pod, nil))
	must(w.t, w.api.Do(context.Background(), http.MethodDelete, path, metav1.DeleteOptions{GracePeriodSeconds: &long}, nil))
}

// drained says that it has gone.
func (w *world) drained(name string) {
	w.t.Helper()
	zero := int64(0)
	must(w.t, w.api.Do(context.Background(), http.MethodDelete, podsPath("default")+"/"+name, metav1.DeleteOptions{GracePeriodSeconds: &zero}, nil))
}

// cni calls the plugin as a runtime does.
func (w *world) cni(command string, p *kubePod, ips ...netip.Addr) ([]byte, error) {
	conf := map[string]any{
		"cniVersion": "1.1.0", "name": "net", "type": "mustang-cni", "mode": "veth", "mtu": 1500,
		"bpffs": w.lab.BPFFS(), "stateDir": w.lab.StateDir(),
		"ipam": map[string]any{"type": "mustang", "pools": []string{"10.250.0.0/24", "fd00:250::/64"}},
	}
	args := "IgnoreUnknown=1;K8S_POD_NAMESPACE=" + p.namespace + ";K8S_POD_NAME=" + p.Name
	if len(ips) > 0 {
		var list []string
		for _, ip := range ips {
			list = append(list, ip.String())
		}
		conf["args"] = map[string]any{"cni": map[string]any{"ips": list}}
	}
	text, err := json.Marshal(conf)
	if err != nil {
		return nil, err
	}
	c := w.lab.Node().Command(context.Background(), plugin)
	c.Env = append(c.Env, "CNI_COMMAND="+command, "CNI_CONTAINERID="+p.namespace+"-"+p.Name, "CNI_NETNS="+p.NetNS,
		"CNI_IFNAME=eth0", "CNI_PATH=/nowhere", "CNI_ARGS="+args)
	var out, errs bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = bytes.NewReader(text), &out, &errs
	if err := c.Run(); err != nil {
		return nil, fmt.Errorf("%s of %s: %w: %s%s", command, p.Name, err, out.Bytes(), errs.Bytes())
	}
	return out.Bytes(), nil
}

// connect has the plugin connect a pod, and learns its addresses.
func (w *world) connect(p *kubePod, ips ...netip.Addr) {
	w.t.Helper()
	out, err := w.cni("ADD", p, ips...)
	must(w.t, err)
	w.learn(p, out)
	w.t.Cleanup(func() { w.disconnect(p) })
}

func (w *world) learn(p *kubePod, out []byte) {
	w.t.Helper()
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	must(w.t, json.Unmarshal(out, &result))
	for _, ip := range result.IPs {
		if a := ip.Address.Addr(); a.Is4() {
			p.IPv4 = a
		} else {
			p.IPv6 = a
		}
	}
}

func (w *world) disconnect(p *kubePod) {
	w.t.Helper()
	_, err := w.cni("DEL", p)
	check(w.t, err)
}

// tries is how long a connection that policy stops is waited for.
const tries = 250 * time.Millisecond

// dialPod connects two pods, by the first segment.
func dialPod(from, to *kubePod, v4 bool, wait time.Duration) (conn net.Conn, err error) {
	addr := to.IPv6
	if v4 {
		addr = to.IPv4
	}
	err = from.Do(func() error {
		conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(addr, serverPort).String(), wait)
		return err
	})
	if err != nil {
		return nil, err
	}
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err == nil {
		var info *unix.TCPInfo
		outer := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
		if err = errors.Join(outer, err); err == nil && info.Total_retrans > 0 {
			err = fmt.Errorf("%d segments were sent again before there was a connection", info.Total_retrans)
		}
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// reaches says whether from reaches to within wait, which both families must agree on.
func reaches(from, to *kubePod, wait time.Duration) (bool, error) {
	var got [2]bool
	for i := range got {
		conn, err := dialPod(from, to, i == 0, wait)
		timeout := net.Error(nil)
		if err != nil && !(errors.As(err, &timeout) && timeout.Timeout()) {
			return false, err
		}
		if got[i] = err == nil; got[i] {
			conn.Close()
		}
	}
	if got[0] != got[1] {
		return false, fmt.Errorf("by IPv4 %v, by IPv6 %v", got[0], got[1])
	}
	return got[0], nil
}

// expect waits until from reaches to, or does not.
func (w *world) expect(from, to *kubePod, want bool) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("%s reaches %s: %v", from.Name, to.Name, want), func() error {
		got, err := reaches(from, to, tries)
		if err == nil && got != want {
			err = errors.New("it is otherwise")
		}
		return err
	})
}

// holds wants it so now, and for a while.
func (w *world) holds(from, to *kubePod, want bool) {
	w.t.Helper()
	wait := map[bool]time.Duration{true: patience, false: tries}[want]
	for range 3 {
		if got, err := reaches(from, to, wait); err != nil || got != want {
			w.t.Errorf("%s reaches %s: %v, %v; want %v", from.Name, to.Name, got, err, want)
		}
	}
}

// conversation is a connection that stays.
type conversation struct {
	net.Conn
	lines *bufio.Reader
}

func (w *world) converse(from, to *kubePod) conversation {
	w.t.Helper()
	conn, err := dialPod(from, to, true, patience)
	must(w.t, err)
	c := conversation{conn, bufio.NewReader(conn)}
	must(w.t, c.say(patience))
	w.t.Cleanup(func() { conn.Close() })
	return c
}

// say sends a line and wants an answer.
func (c conversation) say(within time.Duration) error {
	err := c.SetDeadline(time.Now().Add(within))
	if err == nil {
		_, err = io.WriteString(c, "hello\n")
	}
	if err == nil {
		_, err = c.lines.ReadString('\n')
	}
	return err
}

const hammerPort = 7777

// listen counts datagrams.
func (w *world) listen(p *kubePod) *atomic.Int64 {
	w.t.Helper()
	var conn net.PacketConn
	must(w.t, p.Do(func() (err error) {
		conn, err = net.ListenPacket("udp", fmt.Sprintf("[::]:%d", hammerPort))
		return err
	}))
	n, done := new(atomic.Int64), make(chan struct{})
	go func() {
		defer close(done)
		for buf := make([]byte, 100); ; n.Add(1) {
			if _, _, err := conn.ReadFrom(buf); err != nil {
				return
			}
		}
	}()
	w.t.Cleanup(func() { conn.Close(); <-done })
	return n
}

// hammer sends until ctx ends, from sockets of ever new ports.
func hammer(ctx context.Context, t *testing.T, from *kubePod, to netip.AddrPort) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			var conn net.Conn
			err := from.Do(func() (err error) { conn, err = net.Dial("udp", to.String()); return err })
			if err != nil {
				time.Sleep(time.Millisecond) // no route yet
				continue
			}
			for range 20 {
				_, _ = conn.Write([]byte("x"))
				time.Sleep(100 * time.Microsecond)
			}
			conn.Close()
		}
	}()
	t.Cleanup(func() { <-done })
}
