// SPDX-License-Identifier: Apache-2.0

package cni

// IPAM plugins of others. Written here rather than taken from cni/pkg/invoke,
// which brings a tracing library into every start of the plugin.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
)

// delegate runs plugin with config. An older plugin, which does not know the
// configuration's version, is asked again in the newest one it knows.
func delegate(plugin string, config []byte, c call) ([]byte, error) {
	file, err := findPlugin(plugin, c.path)
	if err != nil {
		return nil, err
	}
	out, err := execPlugin(file, config, c)
	if err == nil {
		return out, nil
	}
	if c.command == "GC" || c.command == "STATUS" {
		// One that is older than these two has many ways to say so.
		if known, verr := knownVersions(file, c); verr == nil && !slices.Contains(known, "1.1.0") {
			return nil, nil
		}
		return nil, err
	}
	var e *types.Error
	if !errors.As(err, &e) || e.Code != types.ErrIncompatibleCNIVersion {
		return out, err
	}
	older, verr := olderVersion(file, config, c)
	if verr != nil {
		return nil, errors.Join(err, verr)
	}
	return execPlugin(file, older, c)
}

func findPlugin(plugin, path string) (string, error) {
	for _, dir := range filepath.SplitList(path) {
		file := filepath.Join(dir, plugin)
		if st, err := os.Stat(file); err == nil && st.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("find IPAM plugin %q in CNI_PATH %q: %w", plugin, path, fs.ErrNotExist)
}

// execPlugin runs a plugin, which ends with this process: one that lived on would give an
// address after the DEL of who was killed.
func execPlugin(file string, config []byte, c call) ([]byte, error) {
	var out bytes.Buffer
	cmd := exec.Command(file)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // whose end is what the kernel tells by that signal
	defer runtime.UnlockOSThread()
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = c.env(), bytes.NewReader(config), &out, os.Stderr
	err := cmd.Run()
	if err == nil {
		return out.Bytes(), nil
	}
	e := &types.Error{}
	if json.Unmarshal(out.Bytes(), e) == nil && e.Msg != "" {
		return nil, e
	}
	return nil, fmt.Errorf("IPAM plugin %s: %w: %s", filepath.Base(file), err, bytes.TrimSpace(out.Bytes()))
}

// knownVersions are the versions of the spec that a plugin speaks, oldest first.
func knownVersions(file string, c call) ([]string, error) {
	out, err := execPlugin(file, []byte(`{"cniVersion":"1.0.0"}`), call{command: "VERSION", path: c.path})
	if err != nil {
		return nil, err
	}
	var info struct{ SupportedVersions []string }
	if err := json.Unmarshal(out, &info); err != nil || len(info.SupportedVersions) == 0 {
		return nil, fmt.Errorf("%s tells no supported versions", filepath.Base(file))
	}
	return info.SupportedVersions, nil
}

// olderVersion is config with the newest version that the plugin knows.
func olderVersion(file string, config []byte, c call) ([]byte, error) {
	known, err := knownVersions(file, c)
	if err != nil {
		return nil, err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(config, &fields); err != nil {
		return nil, err
	}
	newest := known[len(known)-1]
	if prev := fields["prevResult"]; len(prev) > 0 && string(prev) != "null" {
		r, err := parseResult(prev, versionOf(config))
		if err != nil {
			return nil, err
		}
		return withPrevResult(config, r, newest)
	}
	fields["cniVersion"], _ = json.Marshal(newest)
	return json.Marshal(fields)
}

// parseResult reads any version's ADD result.
func parseResult(out []byte, fallbackVersion string) (*types100.Result, error) {
	var v struct {
		CNIVersion string `json:"cniVersion"`
	}
	if err := json.Unmarshal(out, &v); err != nil {
		return nil, codedf(types.ErrDecodingFailure, "read a plugin's result: %v", err)
	}
	if v.CNIVersion == "" {
		v.CNIVersion = fallbackVersion
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(out, &fields); err != nil {
			return nil, codedf(types.ErrDecodingFailure, "read a plugin's result: %v", err)
		}
		fields["cniVersion"], _ = json.Marshal(fallbackVersion)
		out, _ = json.Marshal(fields)
	}
	r, err := create.Create(v.CNIVersion, out)
	if err != nil {
		return nil, codedf(types.ErrDecodingFailure, "read a plugin's result: %v", err)
	}
	return types100.GetResult(r)
}
