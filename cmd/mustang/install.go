// SPDX-License-Identifier: Apache-2.0

package main

// mustang install-cni, uninstall-cni: the plugin and its network list, where
// the container runtime looks for them.

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

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// pluginFile is the plugin's name: the "type" of configurations.
const pluginFile = "mustang-cni"

// installFlags are those of install-cni and uninstall-cni.
type installFlags struct {
	binDir, confDir, netnsDir   string
	name, plugin, config        string
	mode, uplink, mtu           string
	pools, exclude              []string
	displace, adopt, masquerade bool
}

func (f *installFlags) dirs(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.binDir, "bin-dir", "/opt/cni/bin", "where the runtime looks for plugins")
	cmd.Flags().StringVar(&f.confDir, "conf-dir", "/etc/cni/net.d", "where the runtime looks for networks")
	cmd.Flags().StringVar(&f.name, "conf-name", "05-mustang.conflist", "the network list's file")
}

func newInstallCNICmd(g *globals) *cobra.Command {
	var f installFlags
	cmd := &cobra.Command{
		Use:   "install-cni",
		Short: "Put the CNI plugin and its network list where the container runtime looks",
		Long: `Put the CNI plugin and its network list where the container runtime looks for
them, each in one step. Another network's list is not displaced unless you say
so. Pods that exist already are listed as not mustang's, or adopted.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.install(cmd, g) },
	}
	f.dirs(cmd)
	fl := cmd.Flags()
	fl.StringVar(&f.plugin, "plugin", "", "the plugin's file (default: "+pluginFile+" beside this tool)")
	fl.StringVar(&f.config, "config", "", "network list to install (default: one is made from the flags below)")
	fl.BoolVar(&f.displace, "displace", false, "install although another network's list is there")
	fl.StringVar(&f.netnsDir, "netns-dir", netns.Dir, "where the runtime keeps pods' network namespaces")
	fl.BoolVar(&f.adopt, "adopt", false, "make existing pods endpoints, so that Services work in them")
	fl.StringVar(&f.mode, "mode", link.Veth, "how pods are connected: "+strings.Join(link.Modes, ", "))
	fl.StringVar(&f.uplink, "uplink", "", "the node's interface to the network (default: that of its default route)")
	fl.StringVar(&f.mtu, "mtu", "auto", "bytes, or auto: the uplink's")
	fl.StringSliceVar(&f.pools, "pool", nil, "networks of this node that pods get addresses from; repeat, or separate by commas")
	fl.BoolVar(&f.masquerade, "masquerade", true, "towards the outside, pods wear the node's address")
	fl.StringSliceVar(&f.exclude, "masquerade-exclude", nil, "destinations that are not masqueraded: the cluster's networks")
	return cmd
}

func newUninstallCNICmd(g *globals) *cobra.Command {
	var f installFlags
	cmd := &cobra.Command{
		Use:   "uninstall-cni",
		Short: "Remove what install-cni put there; running pods stay as they are",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.uninstall(cmd.OutOrStdout()) },
	}
	f.dirs(cmd)
	return cmd
}

func (f *installFlags) install(cmd *cobra.Command, g *globals) error {
	list, err := f.list(g)
	if err != nil {
		return err
	}
	if err := f.refuseOthers(); err != nil {
		return err
	}
	if f.plugin == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find the mustang binary: %w", err)
		}
		f.plugin = filepath.Join(filepath.Dir(self), pluginFile)
	}
	plugin, err := os.ReadFile(f.plugin)
	if err != nil {
		return fmt.Errorf("read the plugin: %w; name it by --plugin", err)
	}
	// The plugin first: a runtime uses a list as soon as it sees it.
	for _, x := range []struct {
		path string
		text []byte
		mode os.FileMode
	}{{filepath.Join(f.binDir, pluginFile), plugin, 0o755}, {filepath.Join(f.confDir, f.name), list, 0o644}} {
		if err := replaceFile(x.path, x.text, x.mode); err != nil {
			return err
		}
		fmt.Fprintln(cmd.OutOrStdout(), "installed", x.path)
	}
	return f.existing(cmd, g)
}

// list is the network list to install, checked.
func (f *installFlags) list(g *globals) ([]byte, error) {
	text, err := os.ReadFile(f.config)
	if f.config == "" {
		text, err = f.makeList(g)
	}
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	plugins, err := pluginsOf(text)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	ours := false
	for _, p := range plugins {
		if typeOf(p) != pluginFile {
			continue
		}
		ours = true
		c, err := cni.Parse(p, func(field string) { g.notify(fmt.Sprintf("unknown field %q in the network list", field)) })
		if err == nil {
			err = c.Validate()
		}
		if err != nil {
			return nil, usagef("%w", err)
		}
	}
	if !ours {
		return nil, usagef("--config: no plugin of type %s is in the list", pluginFile)
	}
	return text, nil
}

func (f *installFlags) makeList(g *globals) ([]byte, error) {
	if len(f.pools) == 0 {
		return nil, errors.New("pods need addresses: name this node's networks by --pool, or give a whole list by --config")
	}
	own := map[string]any{"type": pluginFile, "mode": f.mode, "mtu": f.mtu, "masquerade": f.masquerade,
		"ipam":         map[string]any{"type": cni.OwnIPAM, "pools": f.pools},
		"capabilities": map[string]bool{"portMappings": true, "bandwidth": true, "ips": true, "mac": true}}
	var bytes int
	if n, err := fmt.Sscanf(f.mtu, "%d", &bytes); n == 1 && err == nil {
		own["mtu"] = bytes
	}
	for key, value := range map[string]string{"uplink": f.uplink, "cgroupRoot": g.CgroupRoot} {
		if value != "" {
			own[key] = value
		}
	}
	if g.BPFFS != engine.DefaultBPFFS {
		own["bpffs"] = g.BPFFS
	}
	if g.StateDir != engine.DefaultStateDir {
		own["stateDir"] = g.StateDir
	}
	if len(f.exclude) > 0 {
		own["masqueradeExclude"] = f.exclude
	}
	list := map[string]any{"cniVersion": "1.0.0", "name": "mustang", "plugins": []any{own,
		map[string]any{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}}}}
	text, err := json.MarshalIndent(list, "", "  ")
	return append(text, '\n'), err
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
	return err == nil && slices.ContainsFunc(plugins, func(p json.RawMessage) bool { return typeOf(p) == pluginFile })
}

// refuseOthers looks for lists of other networks: the runtime takes the first
// by name, so ours would displace one, or be displaced.
func (f *installFlags) refuseOthers() error {
	entries, err := os.ReadDir(f.confDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for other networks: %w", err)
	}
	var others []string
	for _, e := range entries {
		path := filepath.Join(f.confDir, e.Name())
		if slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(e.Name())) && e.Name() != f.name && !isOurs(path) {
			others = append(others, path)
		}
	}
	target := filepath.Join(f.confDir, f.name)
	if _, err := os.Stat(target); err == nil && !isOurs(target) {
		others = append(others, target)
	}
	if len(others) == 0 || f.displace {
		return nil
	}
	return fmt.Errorf("another network is installed: %s; --displace installs mustang all the same (the runtime takes the first list by name), or put mustang behind it in its own list, in mode chained", strings.Join(others, ", "))
}

// replaceFile writes beside and renames: a runtime that looks meanwhile sees
// the old file or the new one.
func replaceFile(path string, text []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("install %s: %w", path, err)
	}
	// A dot and no known ending: nobody takes it for a plugin or a list.
	beside := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
	f, err := os.OpenFile(beside, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, mode)
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

// existing lists the pods that are not mustang's, or adopts them.
func (f *installFlags) existing(cmd *cobra.Command, g *globals) error {
	paths, err := filepath.Glob(filepath.Join(f.netnsDir, "*"))
	if err != nil || len(paths) == 0 {
		return err
	}
	return g.with(cmd.Context(), !f.adopt, func(e *engine.Engine) error {
		list, err := e.Strangers(paths, link.DefaultIfName)
		if err != nil {
			return err
		}
		var errs []error
		for _, s := range list {
			where := fmt.Sprintf("%s in %s (%s)", s.IfName, s.Netns, strings.Join(s.Addrs, ","))
			if !f.adopt {
				fmt.Fprintln(cmd.OutOrStdout(), "not mustang's:", where)
				continue
			}
			_, err := e.AddEndpoint(cmd.Context(), engine.EndpointSpec{Netns: s.Netns, IfName: s.IfName, Owner: state.OwnerCNI})
			if errors.Is(err, engine.ErrElsewhere) {
				fmt.Fprintln(cmd.OutOrStdout(), "not this node's:", where)
				continue
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("adopt %s: %w", where, err))
				continue
			}
			fmt.Fprintln(cmd.OutOrStdout(), "adopted", where)
		}
		return errors.Join(errs...)
	})
}

// uninstall removes the list first: no runtime must find a list without its
// plugin.
func (f *installFlags) uninstall(w io.Writer) error {
	list := filepath.Join(f.confDir, f.name)
	if _, err := os.Stat(list); err == nil && !isOurs(list) {
		return fmt.Errorf("%s is another network's: it stays; name mustang's by --conf-name", list)
	}
	for _, path := range []string{list, filepath.Join(f.binDir, pluginFile)} {
		err := os.Remove(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("uninstall: %w", err)
		}
		fmt.Fprintln(w, "removed", path)
	}
	return nil
}
