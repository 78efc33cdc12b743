// SPDX-License-Identifier: Apache-2.0

package cluster

// Requests to the API server, and by it to the pods.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

type object map[string]any

// api is a cluster's.
type api struct {
	base   string
	client *http.Client
}

// connect reads a kubeconfig; "" is where kubectl looks.
func connect(kubeconfig string) (*api, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config.QPS = -1
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	host := strings.TrimSuffix(config.Host, "/")
	if !strings.Contains(host, "://") {
		host = "https://" + host
	}
	return &api{host, client}, nil
}

// errStatus is an answer that is not a success.
type errStatus struct {
	code int
	text string
}

func (e errStatus) Error() string { return fmt.Sprintf("%d: %s", e.code, e.text) }

// do sends a body, or none, and reads the answer into out: a []byte as it is, else JSON.
func (a *api) do(ctx context.Context, method, path string, body, out any) error {
	var text io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		text = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.base+path, text)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		var status struct{ Message string }
		if json.Unmarshal(got, &status) != nil || status.Message == "" {
			status.Message = strings.TrimSpace(string(got))
		}
		return errStatus{resp.StatusCode, status.Message}
	}
	switch out := out.(type) {
	case nil:
		return nil
	case *[]byte:
		*out = got
		return nil
	}
	return json.Unmarshal(got, out)
}

// until asks again and again until check is satisfied.
func until(ctx context.Context, what string, check func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		done, err := check()
		if done {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s within two minutes: %w", what, errors.Join(err, context.Cause(ctx)))
		case <-time.After(200 * time.Millisecond):
		}
	}
}
