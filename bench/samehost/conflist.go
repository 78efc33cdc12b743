// SPDX-License-Identifier: Apache-2.0

package samehost

// Contestants that somebody else's CNI configuration connects: any conflist, as a
// container runtime would run it, on a node of the lab.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/leftover"
	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/bench/runner"
	"github.com/mustang-net/mustang/lab"
)

// hostLocalDir is where the reference IPAM plugin keeps a network's addresses,
// unless its configuration names another place.
const hostLocalDir = "/var/lib/cni/networks"

const networkPrefix = "mustang-bench-"

// removeDead removes the addresses of killed runs: a later one may have their name.
func removeDead() error {
	var errs []error
	for _, dir := range leftover.Of(hostLocalDir, networkPrefix) {
		errs = append(errs, os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}

// conflist is a contestant whose pods are connected by CNI plugins. Services are
// the kernel's own, or none.
type conflist struct {
	pods
	network string
	plugins []plugin
	path    []string // directories of plugins
}

// plugin is one of a list.
type plugin struct {
	file   string
	config map[string]any
}

// readConflist checks a file when the run is planned, not when it is built.
func readConflist(p pods, file string, path []string) (conflist, error) {
	c := conflist{pods: p, path: path}
	text, err := os.ReadFile(file)
	if err != nil {
		return c, fmt.Errorf("--conflist: %w", err)
	}
	var list struct {
		Version string           `json:"cniVersion"`
		Name    string           `json:"name"`
		Plugins []map[string]any `json:"plugins"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return c, fmt.Errorf("--conflist %s: %w", file, err)
	}
	if list.Version == "" || list.Name == "" || len(list.Plugins) == 0 {
		return c, fmt.Errorf("--conflist %s: cniVersion, name and plugins must be there: it is a list, not a single plugin's configuration", file)
	}
	// A name of our own: addresses that the IPAM plugin hands out are kept by
	// network, and the machine may run the network itself.
	c.network = fmt.Sprintf("%s%d-%s", networkPrefix, os.Getpid(), p.labName)
	var types []string
	for i, config := range list.Plugins {
		name, _ := config["type"].(string)
		if name == "" || filepath.Base(name) != name {
			return c, fmt.Errorf("--conflist %s: plugin %d: type must be a plugin's name", file, i)
		}
		found, err := findPlugin(name, path)
		if err != nil {
			return c, fmt.Errorf("--conflist %s: %w", file, err)
		}
		config["name"], config["cniVersion"] = c.network, list.Version
		c.plugins = append(c.plugins, plugin{found, config})
		types = append(types, name)
	}
	c.mode = "cni " + list.Name
	c.backend = strings.TrimPrefix(c.backend+", "+strings.Join(types, " + "), ", ")
	return c, nil
}

func findPlugin(name string, path []string) (string, error) {
	for _, dir := range path {
		file := filepath.Join(dir, name)
		if st, err := os.Stat(file); err == nil && st.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("the plugin %s is in none of %s: install it (the reference plugins are in the package containernetworking-plugins), or name its directory by --cni-path",
		name, strings.Join(path, ", "))
}

// conflistEnv is it while it is up.
type conflistEnv struct {
	podsEnv
	c     conflist
	added []attachment
}

// attachment is a pod.
type attachment struct {
	name   string
	ns     *os.File
	result json.RawMessage // of the last plugin
}

func (a attachment) netns() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), a.ns.Fd()) }

// Up builds a node, and connects two pods to it.
func (c conflist) Up(ctx context.Context, cgroup string) (env Env, err error) {
	if err := removeDead(); err != nil {
		return nil, err
	}
	l, err := lab.New(ctx, lab.Config{Name: c.labName, Mode: lab.Bridge, Services: c.labServices(), BridgeNF: kernelServices(c.by), MTU: c.mtu, Binary: c.binary, CgroupRoot: cgroup})
	if err != nil {
		return nil, err
	}
	e := &conflistEnv{podsEnv: podsEnv{lab: l}, c: c}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
			env = nil
		}
	}()
	client, err := e.addPod(ctx, "client")
	if err != nil {
		return nil, err
	}
	server, err := e.addPod(ctx, "server")
	if err != nil {
		return nil, err
	}
	addr, err := server.address(c.v6)
	if err != nil {
		return nil, err
	}
	err = c.addPaths(ctx, &e.podsEnv, runner.Target{ClientNS: client.netns(), ServerNS: server.netns(), ClientCgroup: cgroup, ServerCgroup: cgroup}, addr)
	return e, err
}

// addPod connects a pod: each plugin gets the result of the one before it.
func (e *conflistEnv) addPod(ctx context.Context, name string) (*attachment, error) {
	ns, err := run.NewNetNS(0)
	if err != nil {
		return nil, err
	}
	e.added = append(e.added, attachment{name: name, ns: ns})
	a := &e.added[len(e.added)-1]
	for _, p := range e.c.plugins {
		out, err := e.call(ctx, p, "ADD", a)
		if err != nil {
			return nil, err
		}
		a.result = out
	}
	added := *a // the list may move
	return &added, nil
}

// call runs a plugin on the node, as CNI's specification says (section 4).
func (e *conflistEnv) call(ctx context.Context, p plugin, command string, a *attachment) ([]byte, error) {
	if len(a.result) > 0 {
		p.config["prevResult"] = a.result
	} else {
		delete(p.config, "prevResult")
	}
	text, err := json.Marshal(p.config)
	if err != nil {
		return nil, fmt.Errorf("configuration of %s: %w", p.file, err)
	}
	var out, stderr bytes.Buffer
	cmd := e.lab.Node().Command(ctx, p.file)
	cmd.Env = append(cmd.Env, "CNI_COMMAND="+command, "CNI_CONTAINERID="+e.lab.Name()+a.name, "CNI_NETNS="+a.netns(), "CNI_IFNAME=eth0",
		"CNI_PATH="+strings.Join(e.c.path, ":"), "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME="+a.name)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(text), &out, &stderr
	if err := cmd.Run(); err != nil {
		said := strings.Join(strings.Fields(out.String()+" "+stderr.String()), " ")
		return nil, fmt.Errorf("%s of pod %s by the plugin %s: %w: %s", command, a.name, filepath.Base(p.file), err, said)
	}
	return out.Bytes(), nil
}

// address is the pod's, from the result.
func (a *attachment) address(v6 bool) (netip.Addr, error) {
	var r struct {
		IPs []struct {
			Address netip.Prefix `json:"address"`
		} `json:"ips"`
	}
	if err := json.Unmarshal(a.result, &r); err != nil {
		return netip.Addr{}, fmt.Errorf("result of the CNI plugins for pod %s: %w", a.name, err)
	}
	for _, ip := range r.IPs {
		if ip.Address.Addr().Is6() == v6 {
			return ip.Address.Addr(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("the CNI plugins gave pod %s no address of %s", a.name, map[bool]string{false: "IPv4", true: "IPv6"}[v6])
}

// closePatience is how long the plugins may take to remove their pods.
const closePatience = 20 * time.Second

// Close removes the pods and the node.
func (e *conflistEnv) Close() error {
	// Not the run's context: what it built goes also when it was cut short.
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	var errs []error
	for i := range e.added {
		a := &e.added[i]
		for _, p := range slices.Backward(e.c.plugins) {
			_, err := e.call(ctx, p, "DEL", a)
			errs = append(errs, err)
		}
		errs = append(errs, a.ns.Close())
	}
	errs = append(errs, os.RemoveAll(filepath.Join(hostLocalDir, e.c.network)))
	return errors.Join(append(errs, e.podsEnv.Close())...)
}
