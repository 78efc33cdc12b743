// SPDX-License-Identifier: Apache-2.0

package cluster

// What is made in the cluster: a namespace with pods on two nodes and two Services. All of
// it goes with the namespace.

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/runner"
)

// Ports of the loads' servers, which are all up at once, and of the agents.
const (
	podPort     = 5201
	backendPort = 5202
	hostPort    = 25203
	hostAgain   = 25204
	agentPort   = 25211
	vipPort     = 80
)

// member is one of the pods.
type member struct {
	name string
	node string
	host bool // in the node's own network
	ip   netip.Addr
}

// world is what was made.
type world struct {
	api       *api
	o         Options
	namespace string
	secret    string // of the agents
	members   map[string]*member
}

// The pods' names.
const (
	client     = "client"
	near       = "near"
	far        = "far"
	hostClient = "host-client"
	hostFar    = "host-far"
)

func build(ctx context.Context, o Options) (w *world, err error) {
	a, err := connect(o.Kubeconfig)
	if err != nil {
		return nil, err
	}
	first, second, err := a.nodes(ctx)
	if err != nil {
		return nil, err
	}
	w = &world{api: a, o: o, secret: rand.Text(), members: map[string]*member{}}
	if err := w.makeNamespace(ctx); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
			w = nil
		}
	}()
	for _, m := range []member{{name: client, node: first}, {name: near, node: first}, {name: far, node: second},
		{name: hostClient, node: first, host: true}, {name: hostFar, node: second, host: true}} {
		w.members[m.name] = &m
		if err := w.make(ctx, m); err != nil {
			return w, fmt.Errorf("make pod %s: %w", m.name, err)
		}
	}
	for _, name := range []string{near, far} {
		service := object{"metadata": object{"name": name}, "spec": object{"selector": object{"bench": name}, "ports": []object{{"port": vipPort, "targetPort": backendPort}}}}
		if err := a.do(ctx, http.MethodPost, w.path("services"), service, nil); err != nil {
			return w, fmt.Errorf("make Service %s: %w", name, err)
		}
	}
	for _, m := range w.members {
		if err := until(ctx, "pod "+m.name+" is not ready", func() (bool, error) { return w.ready(ctx, m) }); err != nil {
			return w, err
		}
	}
	return w, nil
}

// makeNamespace makes the namespace. Its name is known before the answer comes, which an interrupt does
// not end: what was made is removed, whether or not anybody heard of it.
func (w *world) makeNamespace(ctx context.Context) error {
	w.namespace = "mustang-bench-" + strings.ToLower(rand.Text()[:8])
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWithin)
	defer cancel()
	err := w.api.do(whole, http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": w.namespace,
		"labels": object{"pod-security.kubernetes.io/enforce": "privileged"}}}, nil)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("make namespace %s: %w", w.namespace, err)
	if refused := (errStatus{}); errors.As(err, &refused) && refused.code < http.StatusInternalServerError {
		return err // none was made; one of this name is somebody else's
	}
	return errors.Join(err, w.close())
}

// make makes a pod. The namespace's service account, without which none is let in,
// comes a moment after the namespace.
func (w *world) make(ctx context.Context, m member) error {
	var refused error
	err := until(ctx, "no service account", func() (bool, error) {
		err := w.api.do(ctx, http.MethodPost, w.path("pods"), w.pod(m), nil)
		if status := (errStatus{}); errors.As(err, &status) && status.code == http.StatusForbidden && strings.Contains(status.text, "service account") {
			return false, err
		}
		refused = err
		return true, nil
	})
	return errors.Join(err, refused)
}

// nodes are the first two that pods may be on.
func (a *api) nodes(ctx context.Context) (first, second string, err error) {
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ Unschedulable bool }
			Status   struct {
				Conditions []struct{ Type, Status string }
			}
		}
	}
	if err := a.do(ctx, http.MethodGet, "/api/v1/nodes", nil, &list); err != nil {
		return "", "", fmt.Errorf("list nodes: %w", err)
	}
	var names []string
	for _, n := range list.Items {
		for _, c := range n.Status.Conditions {
			if c.Type == "Ready" && c.Status == "True" && !n.Spec.Unschedulable {
				names = append(names, n.Metadata.Name)
			}
		}
	}
	if len(names) < 2 {
		return "", "", fmt.Errorf("the cluster has %d nodes that are ready, this bench needs two", len(names))
	}
	return names[0], names[1], nil
}

func (w *world) path(kind string) string { return "/api/v1/namespaces/" + w.namespace + "/" + kind }

// pod is a pod's object. It is bound to its node by name, past the scheduler: where it
// runs is the point.
func (w *world) pod(m member) object {
	command := []string{"mustang", "bench", "agent", "--listen", fmt.Sprintf(":%d", agentPort)}
	container := object{"name": "bench", "image": w.o.Image, "imagePullPolicy": "IfNotPresent", "command": command,
		"env": []object{{"name": SecretVariable, "value": w.secret}}, "securityContext": object{"privileged": true}}
	spec := object{"nodeName": m.node, "hostNetwork": m.host, "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
		"activeDeadlineSeconds": int64(w.o.longest().Seconds()), // a bench that is killed leaves them: they are privileged
		"tolerations":           []object{{"operator": "Exists"}}, "automountServiceAccountToken": false}
	if w.o.HostBinary != "" {
		command[0] = "/mustang"
		container["volumeMounts"] = []object{{"name": "mustang", "mountPath": command[0], "readOnly": true}}
		spec["volumes"] = []object{{"name": "mustang", "hostPath": object{"path": w.o.HostBinary, "type": "File"}}}
	}
	spec["containers"] = []object{container}
	return object{"metadata": object{"name": m.name, "labels": object{"bench": m.name}}, "spec": spec}
}

// ready reads a pod's address, and asks its agent.
func (w *world) ready(ctx context.Context, m *member) (bool, error) {
	var pod struct {
		Status struct {
			PodIP, Phase      string
			ContainerStatuses []struct {
				State struct {
					Waiting struct{ Reason, Message string }
				}
			}
		}
	}
	if err := w.api.do(ctx, http.MethodGet, w.path("pods")+"/"+m.name, nil, &pod); err != nil {
		return false, err
	}
	if pod.Status.Phase != "Running" {
		why := pod.Status.Phase
		for _, c := range pod.Status.ContainerStatuses {
			why += " " + c.State.Waiting.Reason + " " + c.State.Waiting.Message
		}
		return false, errors.New(strings.TrimSpace(why))
	}
	var err error
	if m.ip, err = netip.ParseAddr(pod.Status.PodIP); err != nil {
		return false, err
	}
	err = w.api.do(ctx, http.MethodGet, w.agent(m)+"/ready", nil, nil)
	return err == nil, err
}

// agent is where the API server leads to a pod's agent.
func (w *world) agent(m *member) string {
	return fmt.Sprintf("%s/%s:%d/proxy/%s", w.path("pods"), m.name, agentPort, w.secret)
}

// clusterIP is a Service's.
func (w *world) clusterIP(ctx context.Context, name string) (netip.Addr, error) {
	var s struct{ Spec struct{ ClusterIP string } }
	if err := w.api.do(ctx, http.MethodGet, w.path("services")+"/"+name, nil, &s); err != nil {
		return netip.Addr{}, err
	}
	return netip.ParseAddr(s.Spec.ClusterIP)
}

// closeWithin is how long the API server may take to remove the namespace.
var closeWithin = 30 * time.Second

// close removes the namespace with all that is in it, whatever became of the run.
func (w *world) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeWithin)
	defer cancel()
	err := w.api.do(ctx, http.MethodDelete, "/api/v1/namespaces/"+w.namespace, nil, nil)
	if gone := (errStatus{}); errors.As(err, &gone) && gone.code == http.StatusNotFound {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove namespace %s: %w; its pods are privileged: kubectl delete ns %[1]s", w.namespace, err)
	}
	return nil
}

// way is one path to measure.
type way struct {
	name         string
	via          string
	from, to     *member
	dial, listen netip.AddrPort
}

// load implements runner.Load with a server and a client in two pods.
type clusterLoad struct {
	w                  *world
	from, to           *member
	serverID, clientID string
	stream             bool
}

var _ runner.Load = (*clusterLoad)(nil)
