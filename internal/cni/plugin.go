// SPDX-License-Identifier: Apache-2.0

// Package cni is the CNI plugin: the protocol (spec 1.1.0), and pods connected
// and attached through the same engine as by the tool.
package cni

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/record"
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
	tell    func(sentence string) // warnings
	by      worker
	here    link.Here // what the runtime names, where this process sees it
	turn    *turn
	leaves  bool // mustang leaves the node: what others keep does not hold it
}

// worker is who does the work of an execution.
type worker struct {
	maker record.Maker // the process that the runtime waits for
	agent agentCall    // nil: that process itself
}

func (p *plugin) warn(format string, args ...any) { p.tell(fmt.Sprintf(format, args...)) }

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
	env := callOf(os.Getenv)
	e, err := handOver(env, stdin)
	if err != nil {
		e = dispatch(env, stdin, errors.Is(err, errNoAgent))
	}
	if e != nil {
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

// commands are what a runtime may ask for, each since the version of the spec
// that brought it.
var commands = map[string]struct {
	since string
	run   func(*plugin) error
}{
	"ADD": {versions[0], (*plugin).add}, "DEL": {versions[0], (*plugin).del}, "CHECK": {"0.4.0", (*plugin).check},
	"GC": {"1.1.0", (*plugin).gc}, "STATUS": {"1.1.0", (*plugin).status},
}

// dispatch does a call in this process. alone: there is no agent, who would see
// that ADDs take turns.
func dispatch(env call, stdin []byte, alone bool) *types.Error {
	p, e := prepare(env, stdin, toStderr)
	if e != nil {
		return e
	}
	p.ctx, p.out, p.by.maker = context.Background(), os.Stdout, record.ThisMaker()
	if alone && env.command == "ADD" && fits(p.Mode, p.IPAM.Type) {
		p.turn = takeTurn(p.store)
	}
	return p.run()
}

// prepare checks environment, configuration and version, in this order.
func prepare(env call, config []byte, tell func(string)) (*plugin, *types.Error) {
	if e := env.validate(); e != nil {
		return nil, e
	}
	c, err := Parse(config, func(field string) {
		tell(fmt.Sprintf("unknown field %q in network configuration %s is ignored", field, versionOf(config)))
	})
	if err != nil {
		return nil, coded(types.ErrDecodingFailure, err)
	}
	if e := c.validateNetwork(env.command, commands[env.command].since); e != nil {
		return nil, e
	}
	if env.netns != "" {
		if env.netns, err = filepath.Abs(env.netns); err != nil {
			return nil, coded(types.ErrInternal, err)
		}
	}
	return &plugin{Config: c, store: storeAt(c.StateDir), cniArgs: cniArgs(env.args), env: env, tell: tell}, nil
}

// run runs the command.
func (p *plugin) run() *types.Error {
	if err := commands[p.env.command].run(p); err != nil {
		return coded(types.ErrInternal, err)
	}
	return nil
}

// validateNetwork refuses what makes no network's configuration, and a command
// that its version does not have.
func (c *Config) validateNetwork(command, since string) *types.Error {
	if c.Name == "" {
		return invalid("name", "is missing: every network has one")
	}
	if !isName(c.Name) {
		return invalid("name", "%q is not usable: begin with a letter or a digit, and go on with these, '_', '.' or '-'", c.Name)
	}
	v := cmp.Or(c.CNIVersion, "0.1.0") // as the spec was before it had the field
	at := slices.Index(versions, v)
	if at < 0 {
		return types.NewError(types.ErrIncompatibleCNIVersion, "incompatible CNI versions",
			fmt.Sprintf("cniVersion is %q, and this plugin speaks %s", v, strings.Join(versions, ", ")))
	}
	if at < slices.Index(versions, since) {
		return codedf(types.ErrIncompatibleCNIVersion, "cniVersion %s has no %s: that is since %s", v, command, since)
	}
	return nil
}

// CheckNetwork refuses a list's name or version by which no ADD could work.
func CheckNetwork(name, version string) error {
	if e := (&Config{Name: name, CNIVersion: version}).validateNetwork("ADD", versions[0]); e != nil {
		return e
	}
	return nil
}

// attachment is the one that the environment names.
func (p *plugin) attachment() attachment {
	return attachment{ContainerID: p.env.containerID, IfName: p.env.ifname, Network: p.Name, NetNS: p.env.netns, Mode: p.Mode,
		Bridge: p.Bridge, Uplink: p.Uplink, IPAM: p.IPAM.Type, Args: p.env.args, Config: p.raw}
}

// netnsHere is where this process finds the container's namespace.
func (p *plugin) netnsHere() string { return cmp.Or(p.here.NetNS, p.env.netns) }

// checkNetNS refuses what is no network namespace, and the node's own.
func (p *plugin) checkNetNS() error {
	path := p.env.netns
	pod, err := os.Stat(p.netnsHere())
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
