// SPDX-License-Identifier: Apache-2.0

package samehost

// Services by the real kube-proxy. An API server tells it of them; when its rules are in
// force both end, so that nothing but the rules is there while it is measured. What a
// running kube-proxy costs is `mustang bench services`.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/kubeproxy"
	"github.com/mustang-net/mustang/bench/leftover"
	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

// kubeProxy says whether it is the real one that serves.
func kubeProxy(by lab.ServiceBy) bool { return slices.Contains(kubeproxy.Kinds, kubeproxy.Kind(by)) }

const kubeNode = "n1"

type object map[string]any

// addByKubeProxy gives a node's Services to kube-proxy, waits until all of its rules are in
// force, ends it, and puts those under test where their position says. They then lead to
// target's pods.
func addByKubeProxy(ctx context.Context, n *lab.Node, p pods, services []lab.Service, target runner.Target, tested []testedService) (err error) {
	if missing, err := kube.MissingAPIServer(); err != nil || missing != "" {
		return fmt.Errorf("the real kube-proxy is not built: run test/kube/kube build (%w)", errors.ErrUnsupported)
	}
	dir, err := leftover.TempDir("kube-proxy")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	api, err := kube.StartAPIServer(ctx, n.NetNS, dir)
	if err != nil {
		return err
	}
	defer api.Close()
	node := object{"metadata": object{"name": kubeNode}, // without an address, kube-proxy waits 30 s for one
		"status": object{"addresses": []object{{"type": "InternalIP", "address": n.IPv4.String()}}}}
	if err := api.Do(ctx, http.MethodPost, "/api/v1/nodes", node, nil); err != nil {
		return fmt.Errorf("make the node's object: %w", err)
	}
	if err := writeServices(ctx, api, services); err != nil {
		return fmt.Errorf("%w; %s", err, api.Doing())
	}
	proxy, err := kubeproxy.Start(ctx, n, api, kubeproxy.Options{Kind: kubeproxy.Kind(p.by), Node: kubeNode, Dir: dir, MasqueradeAll: p.siblings()})
	if err != nil {
		return err
	}
	err = proxy.UntilInForce(ctx, services)
	proxy.End()
	if err != nil {
		if down := api.Do(context.WithoutCancel(ctx), http.MethodGet, "/readyz", nil, nil); down != nil {
			err = fmt.Errorf("%w; the API server does not answer: %w; %s", err, down, api.Doing())
		}
		return err
	}
	if tested[0].position != "" {
		if err := place(ctx, proxy, tested); err != nil {
			return fmt.Errorf("put the rules under test into their places: %w", err)
		}
	}
	for _, t := range tested {
		if err := untilAnswered(ctx, target, t); err != nil {
			return fmt.Errorf("all of kube-proxy's rules are in force, but %w", err)
		}
	}
	return nil
}

// writeServices makes the API's objects of them: one of those that share an address. Those
// that differ from the first by their addresses alone come in bulk.
func writeServices(ctx context.Context, api *kube.APIServer, services []lab.Service) error {
	var groups [][]lab.Service
	for _, s := range services {
		if k := len(groups); k > 0 && groups[k-1][0].VIP == s.VIP {
			groups[k-1] = append(groups[k-1], s)
			continue
		}
		groups = append(groups, []lab.Service{s})
	}
	var likes []kube.Like
	for i, g := range groups {
		name := fmt.Sprintf("s%d", i)
		if i > 0 && slices.EqualFunc(g, groups[0], alike) {
			likes = append(likes, kube.Like{Name: name, ClusterIP: g[0].VIP, Endpoints: []netip.Addr{g[0].Backends[0].Addr()}})
		} else if err := writeService(ctx, api, name, g); err != nil {
			return err
		}
	}
	return api.Fill(ctx, "s0", likes)
}

// alike says whether two Services differ by their addresses alone.
func alike(a, b lab.Service) bool {
	return a.Port == b.Port && a.Protocol == b.Protocol && a.Backends[0].Port() == b.Backends[0].Port()
}

// writeService makes one Service with a port for each of the group, and its endpoint.
func writeService(ctx context.Context, api *kube.APIServer, name string, group []lab.Service) error {
	vip := group[0].VIP
	family := map[bool]string{false: "IPv4", true: "IPv6"}[vip.Is6()]
	var ports, backendPorts []object
	for _, s := range group {
		ports = append(ports, object{"name": s.Protocol, "port": s.Port, "protocol": strings.ToUpper(s.Protocol)})
		backendPorts = append(backendPorts, object{"name": s.Protocol, "port": s.Backends[0].Port(), "protocol": strings.ToUpper(s.Protocol)})
	}
	service := object{"metadata": object{"name": name}, "spec": object{"clusterIP": vip.String(), "ipFamilies": []string{family}, "ipFamilyPolicy": "SingleStack", "ports": ports}}
	slice := object{"metadata": object{"name": name, "labels": object{"kubernetes.io/service-name": name}}, "addressType": family, "ports": backendPorts,
		"endpoints": []object{{"addresses": []string{group[0].Backends[0].Addr().String()}, "nodeName": kubeNode, "conditions": object{"ready": true, "serving": true, "terminating": false}}}}
	if err := errors.Join(api.Do(ctx, http.MethodPost, kube.ServicesPath, service, nil), api.Do(ctx, http.MethodPost, kube.SlicesPath, slice, nil)); err != nil {
		return fmt.Errorf("make Service %s: %w", vip, err)
	}
	return nil
}

// siblings says whether pods answer each other directly: only to the node's address does the
// answer come back by the node, which has to translate it.
func (p pods) siblings() bool {
	return slices.Contains([]string{report.Macvlan, string(lab.IPVlan), string(lab.IPVlanL3)}, p.mode)
}

// untilAnswered waits until a Service under test leads to its backend.
func untilAnswered(ctx context.Context, target runner.Target, t testedService) error {
	server, client := lab.Space{NetNS: target.ServerNS}, lab.Space{NetNS: target.ClientNS}
	var l net.Listener
	if err := server.Do(func() (err error) { l, err = net.Listen("tcp", t.backend.String()); return err }); err != nil {
		return err
	}
	defer l.Close()
	for {
		err := client.Do(func() error {
			c, err := net.DialTimeout("tcp", t.vip.String(), 500*time.Millisecond)
			if err == nil {
				c.Close()
			}
			return err
		})
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not led to %s: %w (%w)", t.vip, t.backend, err, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// kubeVIP is the i-th Service's address by kube-proxy: the first ones are the API server's.
func kubeVIP(v6 bool, i int) netip.Addr {
	if v6 {
		return lab.VIP6(1<<16 + i)
	}
	return lab.VIP4(1<<16 + i)
}
