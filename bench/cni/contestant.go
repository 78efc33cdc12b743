// SPDX-License-Identifier: Apache-2.0

// Package cni measures how long ADD and DEL of CNI plugins take: mustang's
// beside the reference plugins, in one run, each as the process that a runtime
// starts.
package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/lab"
)

// contestant is one plugin with its configuration.
type contestant struct {
	name   string
	plugin string // file
	mode   lab.Mode
	config func(l *lab.Lab) map[string]any
	agent  bool // one runs on the node, as on each of Kubernetes
}

// Names are all contestants, in their order of listing.
func Names() (out []string) {
	for _, c := range contestants(Options{}) {
		out = append(out, c.name)
	}
	return out
}

// chosen are the contestants of o, Base always among them.
func chosen(o Options) ([]contestant, error) {
	for _, name := range o.Contestants {
		if !slices.Contains(Names(), name) {
			return nil, fmt.Errorf("contestant %q is unknown: use some of %s", name, strings.Join(Names(), ", "))
		}
	}
	return slices.DeleteFunc(contestants(o), func(c contestant) bool {
		return len(o.Contestants) > 0 && c.name != Base && !slices.Contains(o.Contestants, c.name)
	}), nil
}

func contestants(o Options) []contestant {
	mustang := func(mode lab.Mode) contestant {
		return contestant{name: "mustang " + string(mode), plugin: o.Plugin, mode: mode, config: func(l *lab.Lab) map[string]any {
			return map[string]any{"type": "mustang-cni", "mode": string(mode), "uplink": lab.Uplink, "bpffs": l.BPFFS(), "stateDir": l.StateDir(),
				"ipam": map[string]any{"type": "mustang", "pools": []string{lab.PodCIDR4.String()}}}
		}}
	}
	reference := func(name string, more map[string]any) contestant {
		return contestant{name: name + " + host-local", plugin: filepath.Join(o.Reference, name), mode: lab.Veth, config: func(l *lab.Lab) map[string]any {
			c := map[string]any{"type": name, "ipam": map[string]any{"type": "host-local", "dataDir": filepath.Join(l.StateDir(), "host-local"),
				"ranges": []any{[]any{map[string]any{"subnet": lab.PodCIDR4.String()}}}, "routes": []any{map[string]any{"dst": "0.0.0.0/0"}}}}
			for k, v := range more {
				c[k] = v
			}
			return c
		}}
	}
	withAgent := func(c contestant) contestant {
		c.name, c.agent = c.name+" with agent", true
		return c
	}
	return []contestant{
		withAgent(mustang(lab.Veth)), withAgent(mustang(lab.Bridge)), mustang(lab.Veth), mustang(lab.Bridge), mustang(lab.Macvlan),
		reference("bridge", map[string]any{"isGateway": true}), reference("ptp", nil), reference("macvlan", map[string]any{"master": lab.Uplink}),
	}
}

// env is a contestant on a node of its own.
type env struct {
	contestant
	lab  *lab.Lab
	conf []byte
	path string
	stop func() error // the agent
}

func (c contestant) up(ctx context.Context, o Options, i int) (*env, error) {
	l, err := lab.New(ctx, lab.Config{Name: fmt.Sprintf("cni%d", i), Mode: c.mode, Binary: o.Binary})
	if err != nil {
		return nil, err
	}
	conf := c.config(l)
	// What all contestants speak.
	conf["cniVersion"], conf["name"] = "1.0.0", "bench"
	text, err := json.Marshal(conf)
	e := &env{contestant: c, lab: l, conf: text, path: o.Reference, stop: func() error { return nil }}
	if err == nil && c.agent {
		e.stop, err = startAgent(ctx, l)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return e, nil
}

func (e *env) close() error { return errors.Join(e.stop(), e.lab.Close()) }

// call runs the plugin once, and answers how long that took.
func (e *env) call(ctx context.Context, command string, s space) (time.Duration, error) {
	cmd := e.lab.Node().Command(ctx, e.plugin)
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout = bytes.NewReader(e.conf), &out
	cmd.Env = append(cmd.Env, "CNI_COMMAND="+command, "CNI_CONTAINERID="+s.id, "CNI_NETNS="+s.path, "CNI_IFNAME=eth0", "CNI_PATH="+e.path)
	start := time.Now()
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("%s: %s of %s: %w: %s", e.name, command, s.id, err, bytes.TrimSpace(out.Bytes()))
	}
	return time.Since(start), nil
}
