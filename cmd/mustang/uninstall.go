// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/agent"
	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/install"
)

// uninstallFlags are those of uninstall.
type uninstallFlags struct {
	place install.Place
	pods  bool
}

func newUninstallCmd(g *globals) *cobra.Command {
	var f uninstallFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove mustang from this node: network list, plugin, programs, tables, routes, rules, files",
		Long: `Removes mustang from this node: the network list and the plugin first, so that no
new pod comes, then programs, tables, routes, the tunnel, masquerade and state.
It refuses while an agent runs, which would make them again, and while pods are
connected, unless --pods says that those are to lose their interfaces.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd, g) },
	}
	fl := cmd.Flags()
	fl.StringVar(&f.place.BinDir, "bin-dir", install.DefaultBinDir, "where the runtime looks for plugins")
	fl.StringVar(&f.place.ConfDir, "conf-dir", install.DefaultConfDir, "where the runtime looks for networks")
	fl.StringVar(&f.place.ConfName, "conf-name", install.DefaultConfName, "the network list's file")
	fl.BoolVar(&f.pods, "pods", false, "connected pods lose their interfaces")
	return cmd
}

func (f *uninstallFlags) run(cmd *cobra.Command, g *globals) error {
	scope, out := g.scope(), cmd.OutOrStdout()
	if err := scope.Check(); err != nil {
		return err
	}
	if scope.Held() {
		return fmt.Errorf("an agent, or another mustang, works on %s: stop it first (`kubectl delete -f deploy/mustang.yaml`)", scope.BPFFS)
	}
	pods, err := cni.Attached(scope)
	if err != nil {
		return err
	}
	own, err := newPodStore(g.StateDir).List()
	if err != nil {
		return err
	}
	for _, r := range own {
		pods = append(pods, fmt.Sprintf("%s (%s)", r.Name, r.IfName))
	}
	if len(pods) > 0 && !f.pods {
		return fmt.Errorf("%d pods are connected by mustang: %s; drain the node, or say --pods, and they lose their interfaces", len(pods), strings.Join(pods, ", "))
	}
	removed, err := f.place.Remove()
	for _, path := range removed {
		fmt.Fprintln(out, "removed", path)
	}
	if err != nil {
		return err
	}
	for _, r := range own {
		if err := podRm(cmd.Context(), g, r.Name, out); err != nil {
			return err
		}
	}
	if err := cni.Uninstall(cmd.Context(), scope, f.place.BinDir); err != nil {
		return err
	}
	for _, pod := range pods {
		fmt.Fprintln(out, "disconnected", pod)
	}
	if err := engine.Reset(cmd.Context(), scope, g.notify); err != nil {
		return err
	}
	fmt.Fprintln(out, "removed programs, tables, routes and rules in", g.BPFFS)
	return removeState(g.StateDir)
}

// removeState removes what a killed agent left, and the state directory. Files
// that are not mustang's stay.
func removeState(dir string) error {
	pods := newPodStore(dir)
	errs := []error{pods.Sweep()}
	left, _ := filepath.Glob(filepath.Join(dir, ".status-*")) // of killed calls of earlier plugins
	for _, path := range slices.Concat(agent.Files(dir), left, []string{pods.Path}) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			errs = append(errs, err)
		}
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return fmt.Errorf("%s has something that is not mustang's, and stays: %s", dir, entries[0].Name())
	}
	// In a container it is a mount, which stays: an empty directory, which the next
	// boot does not have.
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EROFS) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
