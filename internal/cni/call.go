// SPDX-License-Identifier: Apache-2.0

package cni

// One execution of a plugin, as the environment describes it (spec, section 2).
// Written here rather than taken from cni/pkg/skel: that reads each
// configuration three times, and its regular expressions are compiled at every
// start.

import (
	"os"
	"strings"
	"unicode"

	"github.com/containernetworking/cni/pkg/types"
)

// call is what CNI passes by environment, to this plugin and to those that it
// delegates to.
type call struct {
	command, containerID, netns, ifname, args, path string
}

func callOf(getenv func(string) string) call {
	return call{getenv("CNI_COMMAND"), getenv("CNI_CONTAINERID"), getenv("CNI_NETNS"), getenv("CNI_IFNAME"), getenv("CNI_ARGS"), getenv("CNI_PATH")}
}

// env is the environment of a delegated plugin.
func (c call) env() []string {
	env := []string{
		"CNI_COMMAND=" + c.command, "CNI_CONTAINERID=" + c.containerID, "CNI_NETNS=" + c.netns,
		"CNI_IFNAME=" + c.ifname, "CNI_ARGS=" + c.args, "CNI_PATH=" + c.path,
	}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "CNI_") {
			env = append(env, kv)
		}
	}
	return env
}

// validate refuses, by the names of the variables, an environment that a command
// cannot work with. DEL does without a namespace: it may be gone.
func (c call) validate() *types.Error {
	if c.command == "" {
		return badVariable("CNI_COMMAND is missing: this is a CNI plugin, which a container runtime calls")
	}
	if _, known := commands[c.command]; !known {
		return badVariable("CNI_COMMAND %q is unknown: use ADD, DEL, CHECK, GC, STATUS or VERSION", c.command)
	}
	var missing []string
	want := func(name, value string) {
		if value == "" {
			missing = append(missing, name)
		}
	}
	if ofAttachment := c.command == "ADD" || c.command == "DEL" || c.command == "CHECK"; ofAttachment {
		want("CNI_CONTAINERID", c.containerID)
		want("CNI_IFNAME", c.ifname)
		if c.command != "DEL" {
			want("CNI_NETNS", c.netns)
		}
	}
	want("CNI_PATH", c.path)
	if len(missing) > 0 {
		return badVariable("required but missing: %s", strings.Join(missing, ", "))
	}
	if c.containerID != "" && !isName(c.containerID) {
		return badVariable("CNI_CONTAINERID %q is not usable: begin with a letter or a digit, and go on with these, '_', '.' or '-'", c.containerID)
	}
	if c.ifname != "" && !isIfName(c.ifname) {
		return badVariable("CNI_IFNAME %q is no name for an interface: use up to 15 characters, without '/', ':' and spaces", c.ifname)
	}
	return nil
}

func badVariable(format string, args ...any) *types.Error {
	return codedf(types.ErrInvalidEnvironmentVariables, format, args...)
}

// isName says whether a network or a container may be called so.
func isName(s string) bool {
	for i, c := range []byte(s) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && (i == 0 || c != '_' && c != '.' && c != '-') {
			return false
		}
	}
	return s != ""
}

// isIfName says whether the kernel would take the name (dev_valid_name).
func isIfName(s string) bool {
	return s != "" && len(s) <= 15 && s != "." && s != ".." && !strings.ContainsFunc(s, func(r rune) bool {
		return r == '/' || r == ':' || unicode.IsSpace(r)
	})
}
