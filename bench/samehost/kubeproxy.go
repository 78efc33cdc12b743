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
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

// The real kube-proxy, by the mode it is started with.
const (
	KubeProxyIptables = "kube-proxy-iptables"
	KubeProxyNftables = "kube-proxy-nftables"
)

func kubeProxy(by lab.ServiceBy) bool { return by == KubeProxyIptables || by == KubeProxyNftables }

const (
	kubeNode     = "n1"
	kubeServices = "/api/v1/namespaces/default/services"
	kubeSlices   = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
	kubeWriters  = 8 // requests at once
)

type object map[string]any

// addByKubeProxy gives a node's Services to kube-proxy, waits until all of its rules are in
// force, ends it, and puts those under test where their position says. They then lead to
// target's pods.
func addByKubeProxy(ctx context.Context, n *lab.Node, p pods, services []lab.Service, target runner.Target, tested []testedService) (err error) {
	if missing, err := kube.MissingAPIServer(); err != nil || missing != "" {
		return fmt.Errorf("the real kube-proxy is not built: run test/kube/kube build (%w)", errors.ErrUnsupported)
	}
	dir, err := os.MkdirTemp("", "mustang-bench-kube-proxy-")
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
		return err
	}
	end, err := startKubeProxy(ctx, n, p, api, dir)
	if err != nil {
		return err
	}
	err = kubeProxyInForce(ctx, n, p.kubeProxyMode(), services)
	end()
	if err == nil && tested[0].position != "" {
		err = placeTested(ctx, n, tested)
	}
	for _, t := range tested {
		if err == nil {
			err = untilAnswered(ctx, target, t)
		}
	}
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "kube-proxy.log"))
		return fmt.Errorf("kube-proxy: %w: %s", err, log[max(0, len(log)-500):])
	}
	return nil
}

func (p pods) kubeProxyMode() string { return strings.TrimPrefix(string(p.by), "kube-proxy-") }

// writeServices makes the API's objects of them: one of those that share an address.
func writeServices(ctx context.Context, api *kube.APIServer, services []lab.Service) error {
	var groups [][]lab.Service
	for _, s := range services {
		if k := len(groups); k > 0 && groups[k-1][0].VIP == s.VIP {
			groups[k-1] = append(groups[k-1], s)
			continue
		}
		groups = append(groups, []lab.Service{s})
	}
	work := make(chan int)
	errs := make([]error, kubeWriters)
	var wg sync.WaitGroup
	for w := range kubeWriters {
		wg.Go(func() {
			for i := range work {
				if errs[w] == nil {
					errs[w] = writeService(ctx, api, fmt.Sprintf("s%d", i), groups[i])
				}
			}
		})
	}
	for i := range groups {
		work <- i
	}
	close(work)
	wg.Wait()
	return errors.Join(errs...)
}

// writeService makes one Service with a port for each of the group, and its endpoints.
func writeService(ctx context.Context, api *kube.APIServer, name string, group []lab.Service) error {
	vip := group[0].VIP
	family := map[bool]string{false: "IPv4", true: "IPv6"}[vip.Is6()]
	var ports, backendPorts []object
	var addresses []string
	for _, s := range group {
		ports = append(ports, object{"name": s.Protocol, "port": s.Port, "protocol": strings.ToUpper(s.Protocol)})
		for _, b := range s.Backends {
			backendPorts = append(backendPorts, object{"name": s.Protocol, "port": b.Port(), "protocol": strings.ToUpper(s.Protocol)})
			addresses = append(addresses, b.Addr().String())
		}
	}
	service := object{"metadata": object{"name": name}, "spec": object{"clusterIP": vip.String(), "ipFamilies": []string{family}, "ipFamilyPolicy": "SingleStack", "ports": ports}}
	slice := object{"metadata": object{"name": name, "labels": object{"kubernetes.io/service-name": name}}, "addressType": family, "ports": backendPorts,
		"endpoints": []object{{"addresses": addresses[:1], "nodeName": kubeNode, "conditions": object{"ready": true, "serving": true, "terminating": false}}}}
	if err := errors.Join(api.Do(ctx, http.MethodPost, kubeServices, service, nil), api.Do(ctx, http.MethodPost, kubeSlices, slice, nil)); err != nil {
		return fmt.Errorf("make Service %s: %w", vip, err)
	}
	return nil
}

// startKubeProxy starts it on the node; it logs into dir.
func startKubeProxy(ctx context.Context, n *lab.Node, p pods, api *kube.APIServer, dir string) (end func(), err error) {
	config := filepath.Join(dir, "kube-proxy.yaml")
	// nf_conntrack_max cannot be set in a network namespace: 0 leaves it alone.
	text := fmt.Sprintf("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclientConnection: {kubeconfig: %s}\n"+
		"mode: %s\nclusterCIDR: %s,%s\nhostnameOverride: %s\nmetricsBindAddress: %s\noomScoreAdj: 0\nconntrack: {maxPerCore: 0, min: 0}\n",
		api.Kubeconfig, p.kubeProxyMode(), lab.PodCIDR4, lab.PodCIDR6, kubeNode, kubeProxyMetrics)
	if siblings := []string{report.Macvlan, string(lab.IPVlan), string(lab.IPVlanL3)}; slices.Contains(siblings, p.mode) {
		// Their pods answer each other directly: only to the node's address does the
		// answer come back by the node, which has to translate it.
		text += "iptables: {masqueradeAll: true}\nnftables: {masqueradeAll: true}\n"
	}
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "kube-proxy.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := n.Command(ctx, filepath.Join(api.Programs, "kube-proxy"), "--config", config)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start kube-proxy: %w", err)
	}
	return func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait() // its status is the signal's
	}, nil
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
