// SPDX-License-Identifier: Apache-2.0

// This file starts etcd and an API server alone, without nodes: enough for what
// only follows the API. It takes three seconds.

package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// APIServer is etcd and an API server on 127.0.0.1 of a network namespace.
type APIServer struct {
	// Kubeconfig is the path of an administrator's, for programs in the namespace.
	Kubeconfig string
	// Programs is the directory of etcd, kube-apiserver, kubectl, kube-proxy, ….
	Programs string

	ns      string
	dir     string
	ca      *authority
	client  *http.Client
	etcd    *exec.Cmd
	server  *exec.Cmd
	serverN int // starts of the API server, for the log's name
}

const apiPort = "6443"

// APIServerURL is where it listens in its namespace.
const APIServerURL = "https://127.0.0.1:" + apiPort

// StartAPIServer starts both in the network namespace at path ns; what they
// keep is in dir. They end with Close, or with this process.
func StartAPIServer(ctx context.Context, ns, dir string) (_ *APIServer, err error) {
	if missing, err := MissingAPIServer(); err != nil || missing != "" {
		return nil, errors.Join(err, fmt.Errorf("not built yet: %s; to build: test/kube/kube build", missing))
	}
	b, err := newBuilder(ctx, 1, io.Discard)
	if err != nil {
		return nil, err
	}
	s := &APIServer{ns: ns, dir: dir, Kubeconfig: filepath.Join(dir, "kubeconfig"), Programs: b.dir("hyperkube")}
	if err := s.certify(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	s.etcd, err = s.start("etcd", "etcd", "--name=kube", "--data-dir="+filepath.Join(dir, "etcd"), "--listen-client-urls="+etcdURL,
		"--advertise-client-urls="+etcdURL, "--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync", "--log-level=error")
	if err != nil {
		return nil, err
	}
	return s, s.Start(ctx)
}

// MissingAPIServer is what must be built before StartAPIServer; "": nothing.
func MissingAPIServer() (string, error) {
	b, err := newBuilder(context.Background(), 1, io.Discard)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(b.dir("hyperkube")); err != nil {
		return "hyperkube", nil
	}
	return "", nil
}

func (s *APIServer) certify() error {
	ca, err := newAuthority("kubernetes")
	if err != nil {
		return err
	}
	s.ca = ca
	server, err := ca.issue("kube-apiserver", "", "127.0.0.1", "localhost")
	if err != nil {
		return err
	}
	admin, err := ca.issue("admin", "system:masters")
	if err != nil {
		return err
	}
	account, err := newAuthority("service-account")
	if err != nil {
		return err
	}
	key, err := encodeKey(account.key)
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair([]byte(admin.cert), []byte(admin.key))
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	s.client = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DialContext:     s.dial,
		TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}},
	}}
	var errs []error
	for name, text := range map[string]string{
		"ca.crt": ca.pem, "apiserver.crt": server.cert, "apiserver.key": server.key, "sa.key": key,
		"kubeconfig": kubeconfig(APIServerURL, ca, admin),
	} {
		errs = append(errs, writeFile(filepath.Join(s.dir, name), text, 0o600))
	}
	return errors.Join(errs...)
}

// KubeconfigFor writes the kubeconfig of a user in a group.
func (s *APIServer) KubeconfigFor(user, group string) (string, error) {
	id, err := s.ca.issue(user, group)
	if err != nil {
		return "", err
	}
	path := filepath.Join(s.dir, user+".kubeconfig")
	return path, writeFile(path, kubeconfig(APIServerURL, s.ca, id), 0o600)
}

// Start starts the API server, which Kill has ended, and waits until it answers.
func (s *APIServer) Start(ctx context.Context) (err error) {
	file := func(name string) string { return filepath.Join(s.dir, name) }
	s.serverN++
	s.server, err = s.start(s.serverLog(), "kube-apiserver",
		"--etcd-servers="+etcdURL, "--secure-port="+apiPort, "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/12,fd00:10:96::/108", "--authorization-mode=RBAC",
		"--client-ca-file="+file("ca.crt"), "--tls-cert-file="+file("apiserver.crt"), "--tls-private-key-file="+file("apiserver.key"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+file("sa.key"),
		"--service-account-signing-key-file="+file("sa.key"), "--disable-admission-plugins=ServiceAccount",
		"--max-requests-inflight=4000", "--max-mutating-requests-inflight=2000")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not done after %v", startTimeout))
	defer cancel()
	return poll(ctx, "wait for the API server", 50*time.Millisecond, func(ctx context.Context) error {
		return s.Do(ctx, http.MethodGet, "/readyz", nil, nil)
	})
}

// Kill ends the API server at once; etcd keeps what there is.
func (s *APIServer) Kill() {
	end(s.server)
	s.server = nil
	s.client.CloseIdleConnections()
}

// Doing says what both are doing, for who waits for them in vain.
func (s *APIServer) Doing() string {
	log := func(name string) string { return filepath.Join(s.dir, name+".log") }
	etcd := Doing("etcd", s.etcd.Process.Pid, log("etcd"))
	if s.server == nil {
		return etcd
	}
	return etcd + "; " + Doing("the API server", s.server.Process.Pid, log(s.serverLog()))
}

func (s *APIServer) serverLog() string { return fmt.Sprintf("apiserver-%d", s.serverN) }

// Close ends both.
func (s *APIServer) Close() {
	s.client.CloseIdleConnections()
	end(s.server)
	end(s.etcd)
}

func end(cmd *exec.Cmd) {
	if cmd != nil && cmd.ProcessState == nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// start runs a program in the namespace. It dies with the thread that started
// it, so that thread is kept.
func (s *APIServer) start(name, program string, args ...string) (*exec.Cmd, error) {
	log, err := os.Create(filepath.Join(s.dir, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(s.Programs, program), args...)
	cmd.Args[0] = program
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	err = s.inside(true, cmd.Start)
	return cmd, err
}

// inside runs fn on a thread in the namespace. keep: the thread stays for as
// long as this process does.
func (s *APIServer) inside(keep bool, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		done <- func() error {
			if s.ns == "" {
				return fn()
			}
			ns, err := netns.GetFromPath(s.ns)
			if err != nil {
				return fmt.Errorf("namespace %s: %w", s.ns, err)
			}
			defer ns.Close()
			if err := netns.Set(ns); err != nil {
				return fmt.Errorf("enter %s: %w", s.ns, err)
			}
			return fn()
		}()
		if keep {
			select {}
		}
	}()
	return <-done
}

func (s *APIServer) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = s.inside(false, func() error {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// StatusError is an answer of the API server that is no success.
type StatusError struct {
	Code    int
	Message string
}

func (e *StatusError) Error() string { return e.Message }

// Stream reads an answer that does not end, as of a watch, until ctx does.
func (s *APIServer) Stream(ctx context.Context, path string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, APIServerURL+path, nil)
	if err != nil {
		return nil, err
	}
	endless := *s.client
	endless.Timeout = 0
	resp, err := endless.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, &StatusError{resp.StatusCode, "GET " + path + ": " + resp.Status}
	}
	return resp.Body, nil
}

// Do sends in as JSON, and reads the answer into out; either may be nil.
func (s *APIServer) Do(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, APIServerURL+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return &StatusError{resp.StatusCode, fmt.Sprintf("%s %s: %s: %s", method, path, resp.Status, tail(text, 500))}
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}
