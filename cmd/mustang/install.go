// SPDX-License-Identifier: Apache-2.0

package main

// mustang install-cni, uninstall-cni: the plugin and its network list, where
// the container runtime looks for them.

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/install"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/netns"
	"github.com/mustang-net/mustang/internal/state"
)

// installFlags are those of install-cni and uninstall-cni.
type installFlags struct {
	place                       install.Place
	netnsDir, plugin, config    string
	mode, uplink, mtu           string
	pools, exclude              []string
	displace, adopt, masquerade bool
	pluginOnly                  bool
}

func (f *installFlags) dirs(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.place.BinDir, "bin-dir", install.DefaultBinDir, "where the runtime looks for plugins")
	cmd.Flags().StringVar(&f.place.ConfDir, "conf-dir", install.DefaultConfDir, "where the runtime looks for networks")
	cmd.Flags().StringVar(&f.place.ConfName, "conf-name", install.DefaultConfName, "the network list's file")
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
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.pluginOnly {
				if err := meaningless(cmd, "plugin-only", append([]string{"config", "displace", "netns-dir", "adopt", "conf-name"}, listFlags...)); err != nil {
					return err
				}
				return f.putPlugin(cmd.OutOrStdout())
			}
			if f.config != "" {
				if err := meaningless(cmd, "config", listFlags); err != nil {
					return err
				}
			}
			return f.install(cmd, g)
		},
	}
	f.dirs(cmd)
	fl := cmd.Flags()
	fl.StringVar(&f.plugin, "plugin", "", "the plugin's file (default: "+install.Plugin+" beside this tool)")
	fl.BoolVar(&f.pluginOnly, "plugin-only", false, "install the plugin alone: an agent writes the list when it is ready")
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

// listFlags are those of which a network list is made.
var listFlags = []string{"mode", "uplink", "mtu", "pool", "masquerade", "masquerade-exclude"}

func newUninstallCNICmd(g *globals) *cobra.Command {
	var f installFlags
	cmd := &cobra.Command{
		Use:   "uninstall-cni",
		Short: "Remove what install-cni put there; running pods stay as they are",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			removed, err := f.place.Remove()
			for _, path := range removed {
				fmt.Fprintln(cmd.OutOrStdout(), "removed", path)
			}
			return err
		},
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
	if err := f.putPlugin(cmd.OutOrStdout()); err != nil {
		return err
	}
	if err := cni.LookAgain(g.scope()); err != nil { // pods of others may have addresses of the pools by now
		return err
	}
	path, err := f.place.PutList(list)
	if err != nil {
		return err
	}
	fmt.Fprintln(cmd.OutOrStdout(), "installed", path)
	return f.existing(cmd, g)
}

func (f *installFlags) putPlugin(w io.Writer) error {
	if f.plugin == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find the mustang binary: %w", err)
		}
		f.plugin = filepath.Join(filepath.Dir(self), install.Plugin)
	}
	text, err := os.ReadFile(f.plugin)
	if err != nil {
		return fmt.Errorf("read the plugin: %w; name it by --plugin", err)
	}
	path, err := f.place.PutPlugin(text)
	if err == nil {
		fmt.Fprintln(w, "installed", path)
	}
	return err
}

// list is the network list to install, checked.
func (f *installFlags) list(g *globals) ([]byte, error) {
	text, err := f.text(g)
	if err != nil {
		return nil, err
	}
	err = install.Check(text, func(field string) { g.notify(fmt.Sprintf("unknown field %q in the network list", field)) })
	switch {
	case err != nil && f.config != "":
		return nil, usagef("--config: %w", err)
	case err != nil:
		return nil, usagef("%s", byFlag(err.Error()))
	}
	return text, nil
}

// byFlag is what is wrong with a list that was made of flags, by the flag instead of the field.
func byFlag(wrong string) string {
	wrong = strings.TrimPrefix(wrong, "read the network configuration: ")
	for field, flag := range map[string]string{"mode": "--mode", "mtu": "--mtu", "uplink": "--uplink",
		"ipam": "--pool", "ipam.pools": "--pool", "masqueradeExclude": "--masquerade-exclude"} {
		if rest, is := strings.CutPrefix(wrong, field+": "); is {
			return flag + ": " + rest
		}
	}
	return wrong
}

func (f *installFlags) text(g *globals) ([]byte, error) {
	if f.config == "" {
		return f.makeList(g)
	}
	text, err := os.ReadFile(f.config)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	return text, nil
}

func (f *installFlags) makeList(g *globals) ([]byte, error) {
	if len(f.pools) == 0 {
		return nil, usagef("pods need addresses: name this node's networks by --pool, or give a whole list by --config")
	}
	if f.mode == cni.Chained {
		return nil, usagef("--mode: chained is behind another plugin in its list, and none is made here: write that list, and give it by --config")
	}
	own := map[string]any{"mode": f.mode, "mtu": f.mtu, "masquerade": f.masquerade, "ipam": map[string]any{"type": cni.OwnIPAM, "pools": f.pools}}
	if f.mtu != "auto" {
		bytes, err := strconv.Atoi(f.mtu)
		if err != nil {
			return nil, usagef("--mtu %q is neither a number of bytes nor auto", f.mtu)
		}
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
	return install.List(own)
}

// refuseOthers wants no other network's list there, unless it may be displaced.
func (f *installFlags) refuseOthers() error {
	others, err := f.place.Others()
	if err != nil || len(others) == 0 || f.displace {
		return err
	}
	return fmt.Errorf("another network is installed: %s; --displace installs mustang all the same (the runtime takes the first list by name), or put mustang behind it in its own list, in mode chained", strings.Join(others, ", "))
}

// existing lists the pods that are not mustang's, or adopts them. The list is not worth the wait
// for an agent, which holds the scope for as long as it runs.
func (f *installFlags) existing(cmd *cobra.Command, g *globals) error {
	paths, err := filepath.Glob(filepath.Join(f.netnsDir, "*"))
	if err != nil || len(paths) == 0 {
		return err
	}
	if scope := g.scope(); !f.adopt && scope.Held() {
		g.notify("an agent, or another mustang, works on " + scope.BPFFS + ": pods that exist already are not looked at")
		return nil
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
