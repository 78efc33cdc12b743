// SPDX-License-Identifier: Apache-2.0

// This file asks the API server what `up` and `status` need to know. Manifests
// go through kubectl.

package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"
)

type api struct {
	base   string
	client *http.Client
}

func newAPI(port int, ca *authority, admin identity) (*api, error) {
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	pair, err := tls.X509KeyPair([]byte(admin.cert), []byte(admin.key))
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}},
		DisableKeepAlives: true,
	}
	return &api{
		base:   fmt.Sprintf("https://127.0.0.1:%d", port),
		client: &http.Client{Transport: transport, Timeout: 5 * time.Second},
	}, nil
}

func (a *api) get(ctx context.Context, path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.base+path, nil)
	if err != nil {
		return err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, resp.Status)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(body, into)
}

// podCIDRs returns the pods' addresses of a node, once they are allocated.
func (a *api) podCIDRs(ctx context.Context, node string) ([]netip.Prefix, error) {
	var object struct {
		Spec struct {
			PodCIDRs []netip.Prefix `json:"podCIDRs"`
		} `json:"spec"`
	}
	if err := a.get(ctx, "/api/v1/nodes/"+node, &object); err != nil {
		return nil, err
	}
	if len(object.Spec.PodCIDRs) == 0 {
		return nil, fmt.Errorf("node %s has no pod CIDR yet", node)
	}
	return object.Spec.PodCIDRs, nil
}

// poll calls try until it succeeds; its last error explains a timeout.
func poll(ctx context.Context, what string, every time.Duration, try func(context.Context) error) error {
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w (last: %w)", what, context.Cause(ctx), err)
		case <-time.After(every):
		}
	}
}

// kubectl runs kubectl with a manifest on its standard input.
func (c *cluster) kubectl(ctx context.Context, stdin string, args ...string) error {
	b, err := newBuilder(ctx, 1, io.Discard)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, b.path("hyperkube", "kubectl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig())
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, tail(bytes.TrimSpace(out.Bytes()), 1000))
	}
	return nil
}
