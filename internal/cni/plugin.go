// SPDX-License-Identifier: Apache-2.0

// Package cni is the CNI plugin: the protocol (spec 1.1.0), and pods connected
// and attached through the same engine as by the tool.
package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// versions of the spec that are spoken, oldest first.
var versions = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// plugin is one execution.
type plugin struct {
	*Config
	store   store
	env     call
	cniArgs map[string]string
	ctx     context.Context
	out     io.Writer
}

// Main runs the plugin as a process: environment and standard input in, result
// or error out, and the exit status.
func Main() int {
	if os.Getenv("CNI_COMMAND") == "VERSION" {
		return printVersion(os.Stdin, os.Stdout)
	}
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil {
		return printError("", codedf(types.ErrIOFailure, "read the network configuration: %v", err))
	}
	if e := dispatch(stdin, os.Stdout); e != nil {
		return printError(versionOf(stdin), e)
	}
	return 0
}

func printVersion(in io.Reader, out io.Writer) int {
	answer := struct {
		CNIVersion        string   `json:"cniVersion"`
		SupportedVersions []string `json:"supportedVersions"`
	}{versions[len(versions)-1], versions}
	// Some runtimes leave standard input open: they get our newest version.
	given := make(chan []byte, 1)
	go func() {
		text, _ := io.ReadAll(io.LimitReader(in, 1<<16))
		given <- text
	}()
	select {
	case text := <-given:
		if v := versionOf(text); v != "" {
			answer.CNIVersion = v
		}
	case <-time.After(100 * time.Millisecond):
	}
	if err := json.NewEncoder(out).Encode(answer); err != nil {
		return 1
	}
	return 0
}

func versionOf(config []byte) string {
	var v struct {
		CNIVersion string `json:"cniVersion"`
	}
	_ = json.Unmarshal(config, &v)
	return v.CNIVersion
}

func printError(v string, e *types.Error) int {
	if v == "" {
		v = versions[len(versions)-1]
	}
	_ = json.NewEncoder(os.Stdout).Encode(struct {
		CNIVersion string `json:"cniVersion"`
		*types.Error
	}{v, e})
	return 1
}

// dispatch lets skel check environment and versions, and runs the command.
func dispatch(stdin []byte, out io.Writer) *types.Error {
	r, w, err := os.Pipe()
	if err != nil {
		return coded(types.ErrIOFailure, err)
	}
	go func() {
		w.Write(stdin)
		w.Close()
	}()
	defer r.Close()
	os.Stdin = r // skel reads it from there
	run := func(command string, fn func(*plugin) error) func(*skel.CmdArgs) error {
		return func(args *skel.CmdArgs) error {
			p, err := newPlugin(command, args, out)
			if err == nil {
				err = fn(p)
			}
			if err != nil {
				return coded(types.ErrInternal, err)
			}
			return nil
		}
	}
	return skel.PluginMainFuncsWithError(skel.CNIFuncs{
		Add: run("ADD", (*plugin).add), Del: run("DEL", (*plugin).del), Check: run("CHECK", (*plugin).check),
		GC: run("GC", (*plugin).gc), Status: run("STATUS", (*plugin).status),
	}, version.PluginSupports(versions...), "mustang-cni: the CNI plugin of mustang, an eBPF pod network")
}

func newPlugin(command string, args *skel.CmdArgs, out io.Writer) (*plugin, error) {
	c, err := Parse(args.StdinData, func(field string) {
		warn("unknown field %q in network configuration %s is ignored", field, versionOf(args.StdinData))
	})
	if err != nil {
		return nil, err
	}
	if args.Netns != "" {
		if args.Netns, err = filepath.Abs(args.Netns); err != nil {
			return nil, err
		}
	}
	return &plugin{
		Config: c, store: storeAt(c.StateDir), cniArgs: cniArgs(args.Args), ctx: context.Background(), out: out,
		env: call{command, args.ContainerID, args.Netns, args.IfName, args.Args, args.Path},
	}, nil
}

// attachment is the one that the environment names.
func (p *plugin) attachment() attachment {
	return attachment{ContainerID: p.env.containerID, IfName: p.env.ifname, Network: p.Name, NetNS: p.env.netns, Mode: p.Mode,
		Bridge: p.Bridge, Uplink: p.Uplink, IPAM: p.IPAM.Type, Args: p.env.args, Config: p.raw}
}

// checkNetNS refuses what is no network namespace, and the node's own.
func checkNetNS(path string) error {
	pod, err := os.Stat(path)
	if err != nil {
		return codedf(types.ErrInvalidNetNS, "CNI_NETNS %s: %v", path, errors.Unwrap(err))
	}
	own, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("look at the node's network namespace: %w", err)
	}
	if os.SameFile(pod, own) {
		return codedf(types.ErrInvalidNetNS, "CNI_NETNS %s is the node's own network namespace", path)
	}
	if st, ok := pod.Sys().(*syscall.Stat_t); ok && st.Dev != own.Sys().(*syscall.Stat_t).Dev {
		return codedf(types.ErrInvalidNetNS, "CNI_NETNS %s is not a network namespace", path)
	}
	return nil
}
