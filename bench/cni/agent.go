// SPDX-License-Identifier: Apache-2.0

package cni

// A node's agent, and the API server of an empty cluster that it follows.

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/mustang-net/mustang/bench/leftover"
	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

const nodeName = "bench"

// startAgent starts both on the lab's node, and returns when the agent listens
// for the plugin. errors.ErrUnsupported: Kubernetes is not built.
func startAgent(ctx context.Context, l *lab.Lab) (stop func() error, err error) {
	if missing, err := kube.MissingAPIServer(); err != nil || missing != "" {
		return nil, fmt.Errorf("no API server for the agent: run test/kube/kube build (%w)", errors.ErrUnsupported)
	}
	dir, err := leftover.TempDir("cni")
	if err != nil {
		return nil, err
	}
	end := func() error { return os.RemoveAll(dir) }
	api, err := kube.StartAPIServer(ctx, l.Node().NetNS, dir)
	if err != nil {
		return nil, errors.Join(err, end())
	}
	end = func() error {
		api.Close()
		return os.RemoveAll(dir)
	}
	node := map[string]any{"metadata": map[string]any{"name": nodeName}}
	if err := api.Do(ctx, http.MethodPost, "/api/v1/nodes", node, nil); err != nil {
		return nil, errors.Join(fmt.Errorf("make the node's object: %w", err), end())
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, errors.Join(err, end())
	}
	defer log.Close()
	agent := l.Node().Command(ctx, l.MustangArgs("agent", "--kubeconfig", api.Kubeconfig, "--node", nodeName,
		"--node-mode", "none", "--health-address", "none", "--metrics-address", "none")...)
	agent.Stdout, agent.Stderr = log, log
	if err := agent.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start the agent: %w", err), end())
	}
	ended := make(chan error, 1)
	go func() { ended <- agent.Wait() }()
	stop = func() error {
		_ = agent.Process.Signal(os.Interrupt)
		return errors.Join(<-ended, end())
	}
	for late := time.After(20 * time.Second); ; {
		if _, err := os.Stat(filepath.Join(l.StateDir(), "agent.sock")); err == nil {
			return stop, nil
		}
		select {
		case <-late:
		case err := <-ended:
			ended <- err
		case <-time.After(10 * time.Millisecond):
			continue
		}
		text, _ := os.ReadFile(log.Name())
		return nil, errors.Join(fmt.Errorf("the agent does not listen: %s", text), stop())
	}
}
