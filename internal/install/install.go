// SPDX-License-Identifier: Apache-2.0

// Package install puts the CNI plugin and its network list where a container
// runtime looks for them, each in one step, and takes them away again.
package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/mustang-net/mustang/internal/cni"
)

// Plugin is the plugin's name: its file, and the "type" of configurations.
const Plugin = "mustang-cni"

// Where runtimes look, and the list's name: runtimes take the first by name.
const (
	DefaultBinDir   = "/opt/cni/bin"
	DefaultConfDir  = "/etc/cni/net.d"
	DefaultConfName = "05-mustang.conflist"
)

// Place is where plugins and network lists are.
type Place struct {
	BinDir, ConfDir, ConfName string
}

func (p Place) plugin() string { return filepath.Join(p.BinDir, Plugin) }
func (p Place) list() string   { return filepath.Join(p.ConfDir, p.ConfName) }

// PutPlugin installs the plugin, and answers its path.
func (p Place) PutPlugin(text []byte) (string, error) {
	return p.plugin(), replaceFile(p.plugin(), text, 0o755)
}

// PutList installs the network list, and answers its path. Put the plugin first:
// a runtime uses a list as soon as it sees it.
func (p Place) PutList(text []byte) (string, error) {
	return p.list(), replaceFile(p.list(), text, 0o644)
}

// HasList says whether exactly this list is installed.
func (p Place) HasList(text []byte) bool {
	have, err := os.ReadFile(p.list())
	return err == nil && bytes.Equal(have, text)
}

// HasOurs says whether a list with mustang in it is installed, this or an earlier one.
func (p Place) HasOurs() bool { return isOurs(p.list()) }

// Others are lists of other networks: the runtime takes the first by name, so
// ours would displace one, or be displaced.
func (p Place) Others() ([]string, error) {
	entries, err := os.ReadDir(p.ConfDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for other networks: %w", err)
	}
	var others []string
	for _, e := range entries {
		path := filepath.Join(p.ConfDir, e.Name())
		if !e.IsDir() && slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(e.Name())) && e.Name() != p.ConfName && !isOurs(path) {
			others = append(others, path)
		}
	}
	if _, err := os.Stat(p.list()); err == nil && !isOurs(p.list()) {
		others = append(others, p.list())
	}
	return others, nil
}

// Remove takes list and plugin away, the list first: no runtime must find a
// list without its plugin. It answers what it removed.
func (p Place) Remove() (removed []string, err error) {
	if _, err := os.Stat(p.list()); err == nil && !isOurs(p.list()) {
		return nil, fmt.Errorf("%s is another network's: it stays; name mustang's by --conf-name", p.list())
	}
	for _, path := range []string{p.list(), p.plugin()} {
		os.Remove(beside(path)) // what a killed install has left
		err := os.Remove(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return removed, fmt.Errorf("uninstall: %w", err)
		}
		removed = append(removed, path)
	}
	return removed, nil
}

// List makes a network list of the plugin's own configuration, of which type
// and capabilities are filled in: what mustang itself does. Not bandwidth, which it
// would be told of and do nothing about.
func List(own map[string]any) ([]byte, error) {
	own["type"] = Plugin
	own["capabilities"] = map[string]bool{"portMappings": true, "ips": true, "mac": true}
	text, err := json.MarshalIndent(map[string]any{"cniVersion": "1.0.0", "name": "mustang", "plugins": []any{own}}, "", "  ")
	return append(text, '\n'), err
}

// Check wants a list with mustang in it whose configuration is right. Fields
// that nobody knows go to unknown.
func Check(list []byte, unknown func(field string)) error {
	plugins, err := pluginsOf(list)
	if err != nil {
		return err
	}
	var network struct {
		CNIVersion string          `json:"cniVersion"`
		Name       string          `json:"name"`
		Plugins    json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal(list, &network); err != nil {
		return fmt.Errorf("read the network list: %w", err)
	}
	if network.Plugins == nil {
		return errors.New("plugins is missing: this is no network list, but at most the configuration of one plugin")
	}
	if err := cni.CheckNetwork(network.Name, network.CNIVersion); err != nil {
		return err
	}
	ours := false
	for i, p := range plugins {
		if typeOf(p) != Plugin {
			continue
		}
		ours = true
		c, err := cni.Parse(p, unknown)
		if err == nil {
			err = c.Validate()
		}
		if err != nil {
			return err
		}
		if first := i == 0; first == (c.Mode == cni.Chained) {
			return fmt.Errorf("mode: %q cannot be at place %d of the list: chained is for what another plugin has made, and no other mode is", c.Mode, i+1)
		}
	}
	if !ours {
		return fmt.Errorf("no plugin of type %s is in the list", Plugin)
	}
	return nil
}

// pluginsOf are the plugins of a list, or the one that a single configuration is.
func pluginsOf(text []byte) ([]json.RawMessage, error) {
	var list struct {
		Type    string            `json:"type"`
		Plugins []json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("read the network list: %w", err)
	}
	if list.Type != "" {
		return []json.RawMessage{text}, nil
	}
	return list.Plugins, nil
}

func typeOf(plugin json.RawMessage) string {
	var p struct {
		Type string `json:"type"`
	}
	_ = json.Unmarshal(plugin, &p)
	return p.Type
}

// isOurs says whether a file is a network list with mustang in it.
func isOurs(path string) bool {
	text, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	plugins, err := pluginsOf(text)
	return err == nil && slices.ContainsFunc(plugins, func(p json.RawMessage) bool { return typeOf(p) == Plugin })
}

// beside is where path's content is written first. A dot and no known ending: nobody
// takes it for a plugin or a list.
func beside(path string) string {
	return filepath.Join(filepath.Dir(path), "."+strings.TrimPrefix(filepath.Base(path), ".")+".new")
}

// replaceFile writes beside and renames: a runtime that looks meanwhile sees
// the old file or the new one.
func replaceFile(path string, text []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("install %s: %w", path, err)
	}
	beside := beside(path)
	if err := os.Remove(beside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("install %s: %w", path, err)
	}
	// The directory may be another user's, who leads by a link to what is not his.
	f, err := os.OpenFile(beside, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return fmt.Errorf("install %s: %w", path, err)
	}
	_, err = io.Copy(f, bytes.NewReader(text))
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err == nil {
		err = os.Rename(beside, path)
	}
	if err != nil {
		return fmt.Errorf("install %s: %w", path, errors.Join(err, os.Remove(beside)))
	}
	return nil
}
