// SPDX-License-Identifier: Apache-2.0

package nodes_test

// The tools that everybody measures with: iperf3, nginx and ab.

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/mustang-net/mustang/lab"
)

// background runs a server in a pod until the test ends.
func (w *world) background(p *lab.Pod, argv ...string) {
	w.t.Helper()
	cmd := p.Command(context.Background(), argv...)
	w.must(cmd.Start())
	w.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

// iperf3Said is what iperf3 -J says at its end.
type iperf3Said struct {
	Error string
	End   struct {
		Sent     struct{ Bytes int64 } `json:"sum_sent"`
		Received struct{ Bytes int64 } `json:"sum_received"` // when the sender had finished
	}
}

// measure sends 64 MiB each way: far more than what buffers hold when the sender
// has finished. Each run has a server of its own: one that serves run after run
// does not listen while it puts the last one's things away.
func (w *world) measure(p *lab.Pod, at netip.AddrPort) {
	w.t.Helper()
	const bytes = 64 << 20
	for _, way := range []string{"", "-R"} {
		done := w.iperf3(p)
		argv := strings.Fields(fmt.Sprintf("iperf3 -J --connect-timeout 30000 -n %d -c %s -p %d %s", bytes, at.Addr(), at.Port(), way))
		said, err := w.askIperf3(argv)
		if err != nil || said.Error != "" || said.End.Sent.Bytes < bytes || said.End.Received.Bytes < bytes/4 {
			w.t.Errorf("%v: %v %s, %d bytes sent, %d received", argv, err, said.Error, said.End.Sent.Bytes, said.End.Received.Bytes)
		}
		done()
	}
}

// iperf3 returns when a server for one run listens; done ends it.
func (w *world) iperf3(p *lab.Pod) (done func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(deadline(w.t))
	cmd := p.Command(ctx, "iperf3", "-s", "-1", "--forceflush", "-p", fmt.Sprint(measured.backend))
	out, err := cmd.StdoutPipe()
	w.must(err)
	w.must(cmd.Start())
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if strings.Contains(lines.Text(), "Server listening") {
			go func() { _, _ = io.Copy(io.Discard, out) }()
			return func() { cancel(); _ = cmd.Wait() }
		}
	}
	cancel()
	w.t.Fatalf("iperf3 did not listen in %s: %v", p.Name, cmd.Wait())
	return nil
}

func (w *world) askIperf3(argv []string) (said iperf3Said, err error) {
	out, err := w.from.space.Command(deadline(w.t), argv...).Output()
	if e := json.Unmarshal(out, &said); e != nil {
		err = errors.Join(err, e)
	}
	return said, err
}

// nginx answers every request with the pod's name.
func (w *world) nginx(p *lab.Pod) {
	w.t.Helper()
	dir := w.t.TempDir()
	config := fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log %[1]s/error;
events {}
http {
	access_log off;
	client_body_temp_path %[1]s; proxy_temp_path %[1]s; fastcgi_temp_path %[1]s; uwsgi_temp_path %[1]s; scgi_temp_path %[1]s;
	server { listen 0.0.0.0:%[2]d; listen [::]:%[2]d ipv6only=on; location / { return 200 "%[3]s\n"; } }
}
`, dir, browsed.backend, p.Name)
	file := filepath.Join(dir, "nginx.conf")
	w.must(os.WriteFile(file, []byte(config), 0o600))
	w.background(p, "nginx", "-e", filepath.Join(dir, "error"), "-p", dir, "-c", file)
	listens := func() error {
		c, err := net.Dial("tcp", netip.AddrPortFrom(p.IPv4, browsed.backend).String())
		if err == nil {
			c.Close()
		}
		return err
	}
	for ctx := deadline(w.t); p.Do(listens) != nil; time.Sleep(10 * time.Millisecond) {
		w.must(ctx.Err())
	}
}

// browse makes connections, several at once.
func (w *world) browse(_ *lab.Pod, at netip.AddrPort) {
	w.t.Helper()
	out := w.run(w.from.space, "ab -q -s 60 -n 200 -c 8 http://%s/", at)
	if !strings.Contains(out, "Complete requests:      200\n") || !strings.Contains(out, "Failed requests:        0\n") {
		w.t.Errorf("ab says\n%s", out)
	}
}
