// SPDX-License-Identifier: Apache-2.0

package runner

// nginx and ab, the tools of the article on Services and policies.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/leftover"
)

// Scenarios by nginx and ab: a connection for each request, or kept open.
const (
	ABShort = "ab-short"
	ABLong  = "ab-long"
)

// abShortRequests and abLongRequests are how many a turn makes, and abClients how many are under way at once.
const (
	abShortRequests = 600
	abLongRequests  = 2000
	abClients       = 8
)

// ABTools names what is missing, with its package.
func ABTools() error {
	for program, pkg := range map[string]string{"nginx": "nginx", "ab": "apache2-utils"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("no %s: install the package %s", program, pkg)
		}
	}
	return nil
}

// nginxConfig answers every request with three bytes, by one process that writes no
// log. Its directory is its own.
const nginxConfig = `daemon off;
master_process off;
worker_processes 1;
pid nginx.pid;
error_log stderr crit;
events { worker_connections 1024; }
http {
	access_log off;
	keepalive_requests 1000000000;
	keepalive_timeout 3600;
	client_body_temp_path .; proxy_temp_path .; fastcgi_temp_path .; uwsgi_temp_path .; scgi_temp_path .;
	server { listen %s; location / { default_type text/plain; return 200 "ok\n"; } }
}
`

// abLoad is a server that stays, and a client for each turn.
type abLoad struct {
	l      Launcher
	t      Target
	long   bool
	dir    string
	server *process
	s      Sample
}

func (l Launcher) ab(ctx context.Context, t Target, scenario string) (Load, error) {
	if err := ABTools(); err != nil {
		return nil, err
	}
	dir, err := leftover.TempDir("nginx")
	if err != nil {
		return nil, err
	}
	a := &abLoad{l: l, t: t, long: scenario == ABLong, dir: dir}
	conf := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, nginxConfig, t.Listen), 0o600); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	_, place := l.places(t)
	if a.server, err = l.start(ctx, place.ExecArgs(l.CC, "nginx", "-p", dir, "-c", conf)); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	// It says nothing when it listens: ask until it answers.
	for deadline := time.Now().Add(slack); ; time.Sleep(10 * time.Millisecond) {
		if _, err = a.ask(ctx, 1); err == nil {
			return a, nil
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			a.Kill()
			return nil, fmt.Errorf("nginx at %s: %w: %s", t.Listen, err, strings.TrimSpace(a.server.stderr.String()))
		}
	}
}

var abFields = regexp.MustCompile(`(?m)^(Complete requests|Failed requests|Non-2xx responses|Time taken for tests|Requests per second): +([0-9.]+)`)

// ask makes requests, and returns their rate.
func (a *abLoad) ask(ctx context.Context, n int) (Turn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, slack, errDeadline)
	defer cancel()
	place, _ := a.l.places(a.t)
	args := []string{"ab", "-q", "-n", strconv.Itoa(n), "-c", strconv.Itoa(min(n, abClients)), "-s", "4"}
	if a.long {
		args = append(args, "-k")
	}
	before, err := a.l.Group.Read()
	if err != nil {
		return Turn{}, err
	}
	p, err := a.l.start(ctx, place.ExecArgs(a.l.CC, append(args, "http://"+a.t.Dial.String()+"/")...))
	if err != nil {
		return Turn{}, err
	}
	if err := p.wait(); err != nil {
		return Turn{}, fmt.Errorf("ab: %w", describe(ctx, err))
	}
	after, err := a.l.Group.Read()
	if err != nil {
		return Turn{}, err
	}
	got := map[string]float64{}
	for _, m := range abFields.FindAllStringSubmatch(string(p.out), -1) {
		got[m[1]], _ = strconv.ParseFloat(m[2], 64)
	}
	if int(got["Complete requests"]) != n || got["Failed requests"]+got["Non-2xx responses"] > 0 || got["Requests per second"] == 0 {
		return Turn{}, fmt.Errorf("ab: of %d requests %.0f were answered, %.0f not as they should be", n, got["Complete requests"], got["Failed requests"]+got["Non-2xx responses"])
	}
	used := after.Sub(before)
	a.s.Count, a.s.Seconds = a.s.Count+int64(n), a.s.Seconds+got["Time taken for tests"]
	a.s.CPU, a.s.Softirqd = a.s.CPU+used.Load.Seconds(), a.s.Softirqd+used.Softirqd.Seconds()
	return Turn{Rate: got["Requests per second"], Cost: used.Total().Seconds() / float64(n)}, nil
}

// Turn implements Load.
func (a *abLoad) Turn(ctx context.Context) (Turn, error) {
	if a.s.Count == 1 {
		a.s = Sample{} // the question whether it is up
	}
	if a.long {
		return a.ask(ctx, abLongRequests)
	}
	return a.ask(ctx, abShortRequests)
}

// Finish implements Load.
func (a *abLoad) Finish() (Sample, error) {
	a.Kill()
	a.s.Rate = float64(a.s.Count) / a.s.Seconds
	return a.s, nil
}

// Kill implements Load.
func (a *abLoad) Kill() {
	a.server.kill()
	_ = os.RemoveAll(a.dir)
}
