// SPDX-License-Identifier: Apache-2.0

package agent

// What makes the node ready for pods: what is inside for masquerade, the network
// list that the container runtime looks for, and the taint that keeps pods away
// until then.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/install"
	"github.com/mustang-net/mustang/internal/k8s"
)

// network is what the agent last did about it.
type network struct {
	inside []netip.Prefix // what masquerade was told
	told   bool
	list   []byte   // the network list that was put in place
	others []string // other networks' lists beside it, as they were told of
}

// place is where network lists are.
func (c Config) place() install.Place {
	return install.Place{ConfDir: c.CNIConfDir, ConfName: install.DefaultConfName}
}

// cniList is the network list of a node with these pod CIDRs.
func (c Config) cniList(cidrs []netip.Prefix) ([]byte, error) {
	own := map[string]any{"masquerade": true, "requireAgent": true}
	maps.Copy(own, c.CNI)
	fill := func(field string, value any) {
		if _, given := own[field]; !given {
			own[field] = value
		}
	}
	var pools []string
	for _, p := range cidrs {
		pools = append(pools, p.String())
	}
	fill("ipam", map[string]any{"type": cni.OwnIPAM, "pools": pools})
	if c.CgroupRoot != "" {
		fill("cgroupRoot", c.CgroupRoot)
	}
	if filepath.Clean(c.BPFFS) != engine.DefaultBPFFS {
		fill("bpffs", c.BPFFS)
	}
	if filepath.Clean(c.StateDir) != engine.DefaultStateDir {
		fill("stateDir", c.StateDir)
	}
	return install.List(own)
}

// checkCNI looks for what is wrong with the plugin's configuration whatever the
// node's pod CIDRs are.
func (c Config) checkCNI() error {
	if c.CNIConfDir == None {
		if len(c.CNI) > 0 {
			return errors.New("cni is given, and cni-conf-dir is none: nobody would write it; give the runtime's directory, or drop cni")
		}
		return nil
	}
	if c.CNI["mode"] == cni.Chained {
		return errors.New("cni: mode chained is behind another plugin, whose list is yours to write: set cni-conf-dir to none")
	}
	list, err := c.cniList([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")})
	if err != nil {
		return fmt.Errorf("cni: %w", err)
	}
	var unknown []string
	if err := install.Check(list, func(field string) { unknown = append(unknown, field) }); err != nil {
		return fmt.Errorf("cni: %w", err)
	}
	if len(unknown) > 0 {
		return fmt.Errorf("cni has no field %s; docs/cni.md lists them", strings.Join(unknown, ", "))
	}
	return nil
}

// ready makes the node ready for pods, once everything is in force; a network
// list and the taint are the last things to change.
func (s *syncer) ready(ctx context.Context, changes []k8s.Change) {
	if !s.synced.Load() || s.readyRetry.rests() && !aboutNodes(changes) {
		return
	}
	start := time.Now()
	err := s.makeReady(ctx)
	if ctx.Err() != nil {
		return
	}
	var because string
	if err == nil {
		s.readyRetry.succeeded()
	} else {
		s.readyRetry.wait(start)
		because = "the node is not ready for pods: " + err.Error()
	}
	if before := s.unready.Swap(&because); err != nil && (before == nil || *before != because) {
		s.a.metrics.failures.Inc()
		s.a.log.Error("the node is not ready for pods; it is tried again", "error", err)
	}
}

func (s *syncer) makeReady(ctx context.Context) error {
	err := s.tellInside(ctx)
	if s.a.config.CNIConfDir != None {
		err = errors.Join(err, s.writeList())
	}
	if err != nil {
		return err
	}
	return s.untaint(ctx)
}

// tellInside says where pods are, on all nodes: towards them nobody wears the
// node's address.
func (s *syncer) tellInside(ctx context.Context) error {
	var all []netip.Prefix
	for _, n := range s.a.watch.Nodes.All() {
		all = append(all, n.PodCIDRs...)
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	if s.network.told && slices.Equal(all, s.network.inside) {
		return nil
	}
	if err := s.a.with(ctx, func(e *engine.Engine) error { return e.SetInside(all) }); err != nil {
		return err
	}
	s.network.told, s.network.inside = true, all
	return nil
}

// writeList puts the network list in place. Pods that run are not concerned.
func (s *syncer) writeList() error {
	self := s.a.watch.Nodes.Get(s.a.nodeKey())
	if self == nil {
		return fmt.Errorf("there is no Node %q", s.a.config.Node)
	}
	if _, given := s.a.config.CNI["ipam"]; !given && len(self.PodCIDRs) == 0 {
		return errors.New("the Node has no podCIDRs, from which pods get addresses: have the controller manager give them (--allocate-node-cidrs)")
	}
	place := s.a.config.place()
	list, err := s.a.config.cniList(self.PodCIDRs)
	if err != nil {
		return err
	}
	if err := install.Check(list, nil); err != nil { // what every ADD would refuse
		return fmt.Errorf("cni does not go with the Node's podCIDRs %v, and the network list is left as it is: %w", self.PodCIDRs, err)
	}
	others, err := place.Others()
	if err != nil {
		return err
	}
	alone := len(others) == 0 || s.a.config.CNIDisplace
	told := slices.Equal(others, s.network.others)
	if slices.Equal(list, s.network.list) && place.HasList(list) && (alone || told) {
		s.network.others = others
		return nil
	}
	if !alone && !place.HasOurs() {
		return fmt.Errorf("another network is installed: %s; remove it, or set cni-displace (the runtime takes the first list by name)", strings.Join(others, ", "))
	}
	if !place.HasList(list) {
		if err := cni.LookAgain(s.a.config.scope()); err != nil { // pods of others may have addresses of the pools by now
			return err
		}
		path, err := place.PutList(list)
		if err != nil {
			return err
		}
		s.a.log.Info("the network list is in place", "path", path)
	}
	s.network.list, s.network.others = list, others
	if !alone { // it came later, and takes nothing from pods that run
		s.a.log.Warn("another network is installed beside this one's list; new pods are of the first by name: remove the other, or set cni-displace if it is meant", "others", others)
	}
	s.warnOfStrays(self.PodCIDRs)
	return nil
}

// warnOfStrays names pods that have outlived their Node, which came back with other pod
// CIDRs: other nodes have routes to those.
func (s *syncer) warnOfStrays(cidrs []netip.Prefix) {
	if _, given := s.a.config.CNI["ipam"]; given {
		return // where pods are is somebody else's to say
	}
	if pods := s.a.policies.outside(cidrs); len(pods) > 0 {
		s.a.log.Warn("pods have addresses outside this Node's podCIDRs, where other nodes do not find them; delete them, so that they are made anew",
			"pods", pods, "podCIDRs", cidrs)
	}
}
