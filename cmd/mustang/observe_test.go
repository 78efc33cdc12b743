// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/observe"
)

// pod makes a pod by hand and puts the datapath on it; it returns the name of
// its namespace.
func (w *tool) pod(i int) string {
	w.t.Helper()
	ns := fmt.Sprintf("%s-%d", w.netns, i)
	w.sh("ip netns add %s && ip -n %s link add h%d type veth peer name eth0 netns %s", ns, w.netns, i, ns)
	w.t.Cleanup(func() { w.sh("ip netns del %s", ns) })
	w.sh("ip -n %s addr add 10.8.0.%d/32 dev eth0 && ip -n %s link set eth0 up && ip -n %s link set h%d up", ns, i, ns, w.netns, i)
	w.sh("mac=$(ip -n %s -br link show h%d | awk '{print $3}'); ip -n %s neigh add 169.254.10.24 lladdr $mac dev eth0 && ip -n %s route add default via 169.254.10.24 dev eth0 onlink", w.netns, i, ns, ns)
	w.ok("ep", "add", "--ifname=eth0", "--netns=/var/run/netns/"+ns, "--service-path=tc")
	return ns
}

func TestObserveStreamsOneObjectALineAndKeepsWhatDidNotPass(t *testing.T) {
	w := newTool(t)
	a, b := w.pod(1), w.pod(2)
	w.ok("svc", "add", "--service", "10.96.0.5:80", "--protocol", "udp", "--backend", "10.8.0.2:8080")
	cmd := w.command("observe", "-o", "json")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	told := make(chan observe.Flow)
	go func() {
		defer close(told)
		for lines.Scan() {
			var f observe.Flow
			if err := json.Unmarshal(lines.Bytes(), &f); err != nil {
				t.Errorf("%s: %v", lines.Text(), err)
			}
			told <- f
		}
	}()
	send := func(to string) {
		if err := netns.Do(netns.Path(a), func() error {
			c, err := net.Dial("udp", to)
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("word"))
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]bool{}
	for deadline := time.Now().Add(60 * time.Second); len(seen) < 2; {
		if time.Now().After(deadline) {
			t.Fatalf("told only of %v", seen)
		}
		send("10.96.0.5:80")
		send("10.96.0.5:81")
		for more := true; more; {
			select {
			case f, more := <-told:
				if !more {
					t.Fatalf("it ended, and told only of %v: %v", seen, cmd.Wait())
				}
				t.Logf("%s %s → %s, %+v %s", f.Verdict, f.Source, f.Destination, f.Service, f.Reason)
				if f.Verdict == observe.Forwarded && f.Service != nil && strings.HasSuffix(f.Source.Name(), a) && strings.HasSuffix(f.Destination.Name(), b) {
					seen["forwarded"] = true
				}
				if f.Reason == "service_port" && f.Verdict == observe.Refused {
					seen["refused"] = true
				}
			case <-time.After(200 * time.Millisecond):
				more = false
			}
		}
	}
	cmd.Process.Signal(unix.SIGINT)
	for range told {
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("interrupted, it ends with %v", err)
	}
	last, _, code := w.run("", "observe", "--last", "1")
	if code != 0 || !strings.Contains(last, "refused") || !strings.Contains(last, "(service_port)") || strings.Count(last, "\n") != 1 {
		t.Errorf("--last 1 printed %q, status %d", last, code)
	}
	var answers []observe.Answer
	text, _, _ := w.run("", "why", a, "10.96.0.5:81/udp", "-o", "json")
	if err := json.Unmarshal([]byte(text), &answers); err != nil || len(answers) != 1 || answers[0].Verdict != observe.Refused {
		t.Errorf("why printed %s (%v)", text, err)
	}
}

func TestObserveAndWhyRefuseBadInput(t *testing.T) {
	w := newTool(t)
	for _, x := range []struct {
		args string
		code int
		says string
	}{
		{"observe", 1, "no node is set up"},
		{"why 10.8.0.1 10.8.0.2", 1, "no node is set up"},
		{"observe --verdict lost", 2, `"lost" is none of forwarded, dropped, refused`},
		{"observe --reason tired", 2, "docs/reasons.md"},
		{"observe --service web", 2, "svc ls"},
		{"observe --service 0", 2, `--service: "0" is no Service's number`},
		{"observe --protocol tpc", 2, `--protocol: "tpc" is none of icmp, icmpv6, sctp, tcp, udp, arp`},
		{"observe --to 10.96.0.0/33", 2, `--to: "10.96.0.0/33" is no prefix`},
		{"observe --from fd00::1/", 2, `--from: "fd00::1/" is no prefix`},
		{"observe --to 10.96.0.1:80", 2, `--to: "10.96.0.1:80" has a port`},
		{"observe --from fe80::1%eth0", 2, `--from: "fe80::1%eth0" has a zone`},
		{"observe --port 70000", 2, "between 1 and 65535"},
		{"observe --last -1", 2, "--last"},
		{"observe --last 5 --verdict forwarded", 2, "--last shows what did not pass"},
		{"observe --sample 0", 2, "--sample"},
		{"observe --pod a/b/c", 2, `--pod: "a/b/c" is no pod`},
		{"observe --namespace A_b", 2, `--namespace: "A_b"`},
		{"why 10.8.0.1", 2, "write `mustang why SRC DST"},
		{"why 10.8.0.1 10.8.0.2:x", 2, "between 1 and 65535"},
		{"why 10.8.0.1 10.8.0.2:1/xyz", 2, "none of tcp, udp, sctp"},
	} {
		_, errs, code := w.run("", strings.Fields(x.args)...)
		if code != x.code || !strings.Contains(errs, x.says) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: status %d, %q", x.args, code, errs)
		}
	}
}
