// SPDX-License-Identifier: Apache-2.0

package cni

// A node's agent, and as much of an API server as it asks for on an empty
// cluster: it knows all there is to know at once, and then nothing happens.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/mustang-net/mustang/lab"
)

const nodeName = "bench"

// lists are the kinds that an agent follows, by their resource.
var lists = map[string]struct{ version, kind, items string }{
	"services": {"v1", "ServiceList", ""}, "pods": {"v1", "PodList", ""}, "namespaces": {"v1", "NamespaceList", ""},
	"nodes":           {"v1", "NodeList", `{"metadata": {"name": "` + nodeName + `", "uid": "1", "resourceVersion": "1"}}`},
	"endpointslices":  {"discovery.k8s.io/v1", "EndpointSliceList", ""},
	"networkpolicies": {"networking.k8s.io/v1", "NetworkPolicyList", ""},
}

func answer(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	list, known := lists[path.Base(r.URL.Path)]
	query := r.URL.Query()
	switch {
	case !known:
		w.WriteHeader(http.StatusNotFound)
	case query.Has("sendInitialEvents"): // then it lists
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422}`)
	case query.Has("watch"):
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	default:
		fmt.Fprintf(w, `{"kind": %q, "apiVersion": %q, "metadata": {"resourceVersion": "1"}, "items": [%s]}`, list.kind, list.version, list.items)
	}
}

const kubeconfig = `{"apiVersion": "v1", "kind": "Config", "current-context": "x", "contexts": [{"name": "x", "context": {"cluster": "x"}}],
 "clusters": [{"name": "x", "cluster": {"server": "http://%s"}}]}`

// startAgent starts both on the lab's node, and returns when the agent listens
// for the plugin.
func startAgent(ctx context.Context, l *lab.Lab) (stop func() error, err error) {
	var listener net.Listener
	if err := l.Node().Do(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		return nil, fmt.Errorf("listen as an API server: %w", err)
	}
	server := &http.Server{Handler: http.HandlerFunc(answer)}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	dir, err := os.MkdirTemp("", "mustang-bench-cni-")
	end := func() error { return errors.Join(server.Close(), ignoreClosed(<-served), os.RemoveAll(dir)) }
	file := filepath.Join(dir, "kubeconfig")
	if err == nil {
		err = os.WriteFile(file, fmt.Appendf(nil, kubeconfig, listener.Addr()), 0o600)
	}
	if err != nil {
		return nil, errors.Join(err, end())
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, errors.Join(err, end())
	}
	defer log.Close()
	agent := l.Node().Command(ctx, l.MustangArgs("agent", "--kubeconfig", file, "--node", nodeName,
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

func ignoreClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
