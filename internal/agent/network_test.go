// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/install"
)

// TestNetworkList is what the agent makes of its configuration and the Node.
func TestNetworkList(t *testing.T) {
	c := Defaults()
	c.CNIConfDir, c.CgroupRoot, c.BPFFS, c.StateDir = t.TempDir(), "/cg", "/sys/fs/bpf/other", "/run/other"
	c.CNI = map[string]any{"mode": "bridge", "masquerade": false}
	if err := c.Check(); err != nil {
		t.Fatal(err)
	}
	cidrs := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("fd00:1::/64")}
	text, err := c.cniList(cidrs)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Plugins []map[string]any `json:"plugins"`
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	delete(got.Plugins[0], "capabilities")
	want := []map[string]any{
		{"type": "mustang-cni", "mode": "bridge", "masquerade": false, "requireAgent": true, "cgroupRoot": "/cg", "bpffs": "/sys/fs/bpf/other", "stateDir": "/run/other",
			"ipam": map[string]any{"type": "mustang", "pools": []any{"10.1.0.0/24", "fd00:1::/64"}}},
	}
	if diff := cmp.Diff(want, got.Plugins); diff != "" {
		t.Error(diff)
	}
	if len(c.CNI) != 2 {
		t.Errorf("the configuration was changed: %v", c.CNI)
	}
}

func TestWrongNetworkConfigurations(t *testing.T) {
	for name, test := range map[string]struct {
		cni  map[string]any
		dir  string
		want string
	}{
		"an unknown mode":  {map[string]any{"mode": "tunnel"}, "/etc/cni/net.d", "mode"},
		"an unknown field": {map[string]any{"mood": "veth"}, "/etc/cni/net.d", "cni has no field mood"},
		"for nobody":       {map[string]any{"mode": "veth"}, None, "cni-conf-dir is none"},
		"no absolute path": {nil, "net.d", "cni-conf-dir"},
	} {
		c := Defaults()
		c.CNI, c.CNIConfDir = test.cni, test.dir
		if err := c.Check(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want it to say %q", name, err, test.want)
		}
	}
}

// TestChartsConfiguration: the agent takes what the manifest gives it.
func TestChartsConfiguration(t *testing.T) {
	manifest, err := os.ReadFile("../../deploy/mustang.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(manifest), "  agent.yaml: |\n")
	config, _, _ := strings.Cut(rest, "\n---")
	if !found {
		t.Fatal("deploy/mustang.yaml has no agent.yaml")
	}
	file := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(config, "\n    ", "\n")[4:]), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Defaults().Read(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Check(); err != nil {
		t.Error(err)
	}
	if c.CNIConfDir != install.DefaultConfDir || c.StartupTaint == "" {
		t.Errorf("the manifest gives %+v", c)
	}
}

// Another network's list keeps ours from being written. One that comes later, as of what calls ours, is named once, and
// no reason to call the node ill after the agent's next start.
func TestAListBesideOurs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	w := newScripted(t)
	defer w.close()
	dir := t.TempDir()
	w.agent.config.CNIConfDir = dir
	var told bytes.Buffer
	w.agent.log = slog.New(slog.NewTextHandler(&told, nil))
	other := filepath.Join(dir, "00-other.conflist")
	const theirs = `{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "other"}]}`
	node := func(cidr string) {
		check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", cidr)}, ""))
	}
	list := func(when, refused string, warned int) {
		t.Helper()
		told.Reset()
		err := w.agent.sync.writeList()
		if (err == nil) != (refused == "") || err != nil && !strings.Contains(err.Error(), refused) {
			t.Errorf("%s: %v, want %q", when, err, refused)
		}
		if got := strings.Count(told.String(), other); got != warned {
			t.Errorf("%s: told %q, want the other named %d times", when, told.String(), warned)
		}
	}
	node("10.1.0.0/24")
	check(t, os.WriteFile(other, []byte(theirs), 0o600))
	list("before ours", "another network is installed: "+other, 0)
	check(t, os.Remove(other))
	list("alone", "", 0)
	check(t, os.WriteFile(other, []byte(theirs), 0o600))
	list("it comes", "", 1)
	list("it stays", "", 0)
	check(t, os.Remove(other))
	list("it goes", "", 0)
	check(t, os.WriteFile(other, []byte(theirs), 0o600))
	list("it comes back", "", 1)
	w.agent.sync.network = network{}
	list("another agent", "", 1)
	list("again", "", 0)
	node("10.2.0.0/24")
	list("another pod CIDR", "", 1)
	want, err := w.agent.config.cniList([]netip.Prefix{netip.MustParsePrefix("10.2.0.0/24")})
	if err != nil || !w.agent.config.place().HasList(want) {
		t.Errorf("the list is not the one of the new pod CIDR: %v", err)
	}
	check(t, os.Remove(filepath.Join(dir, install.DefaultConfName)))
	list("ours goes", "another network is installed", 0)
}

// What goes with one family's pod CIDRs may not with the other's: no list is written that each ADD would refuse, and the
// one of before stays.
func TestAListThatNoADDTakesIsNotWritten(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	w := newScripted(t)
	defer w.close()
	w.agent.config.CNIConfDir, w.agent.config.CNI = t.TempDir(), map[string]any{"mtu": 1200}
	check(t, w.agent.config.Check())
	node := func(cidrs ...string) {
		n := clusterNode("n1", "192.0.2.1", cidrs[0])
		n.Spec.PodCIDRs = cidrs
		check(t, w.agent.watch.Nodes.Replace([]any{n}, ""))
	}
	refused := func() {
		t.Helper()
		err := w.agent.sync.writeList()
		if err == nil || !strings.Contains(err.Error(), "cni does not go with the Node's podCIDRs [10.1.0.0/24 fd00:1::/64]") || !strings.Contains(err.Error(), "mtu: ") {
			t.Errorf("%v", err)
		}
	}
	node("10.1.0.0/24", "fd00:1::/64")
	refused()
	if w.agent.config.place().HasOurs() {
		t.Error("a list was written")
	}
	node("10.1.0.0/24")
	addresses := filepath.Join(w.agent.config.StateDir, "cni", "addresses")
	looked := filepath.Join(addresses, "looked-10.1.0.0_24")
	check(t, os.MkdirAll(addresses, 0o700))
	check(t, os.Symlink("others", looked))
	check(t, w.agent.sync.writeList())
	if _, err := os.Lstat(looked); !os.IsNotExist(err) {
		t.Error("the next ADD does not look for addresses that others' pods have")
	}
	want, err := w.agent.config.cniList([]netip.Prefix{netip.MustParsePrefix("10.1.0.0/24")})
	check(t, err)
	node("10.1.0.0/24", "fd00:1::/64")
	refused()
	if !w.agent.config.place().HasList(want) {
		t.Error("the list of before is gone")
	}
}

// A Node without pod CIDRs gets none from the agent's configuration, which all nodes have: one pool would be given out by each.
func TestWithoutPodCIDRsNobodyIsToldToShareAPool(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	w := newScripted(t)
	defer w.close()
	w.agent.config.CNIConfDir = t.TempDir()
	n := clusterNode("n1", "192.0.2.1", "10.1.0.0/24")
	n.Spec.PodCIDR, n.Spec.PodCIDRs = "", nil
	check(t, w.agent.watch.Nodes.Replace([]any{n}, ""))
	if err := w.agent.sync.writeList(); err == nil || !strings.Contains(err.Error(), "--allocate-node-cidrs") || strings.Contains(err.Error(), "ipam") {
		t.Error(err)
	}
}

// Masquerade is told where pods are, whoever writes the network list.
func TestMasqueradeKnowsThePodsOfAllNodes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	for _, dir := range []string{None, t.TempDir()} {
		w := newScripted(t)
		w.agent.config.CNIConfDir = dir
		check(t, w.agent.watch.Nodes.Replace([]any{clusterNode("n1", "192.0.2.1", "10.1.0.0/24"), clusterNode("n2", "192.0.2.2", "10.2.0.0/24")}, ""))
		check(t, w.agent.sync.makeReady(t.Context()))
		tables, err := datapath.OpenPinned(w.agent.config.BPFFS)
		check(t, err)
		inside, err := tables.Inside.All()
		check(t, err)
		for _, cidr := range []string{"10.1.0.0/24", "10.2.0.0/24"} {
			if _, ok := inside[datapath.InsideKeyOf(bpfgen.InsideAll, netip.MustParsePrefix(cidr))]; !ok {
				t.Errorf("cni-conf-dir %s: %s is not among %v", dir, cidr, inside)
			}
		}
		check(t, tables.Close())
		w.close()
	}
}

// A Node that was removed and added again may have other pod CIDRs: its pods that live on are named, once.
func TestPodsThatOutliveTheirNodesNetworksAreNamed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		w.agent.config.CNIConfDir = t.TempDir()
		var told bytes.Buffer
		w.agent.log = slog.New(slog.NewTextHandler(&told, nil))
		w.tellObjects(nil, nil)
		check(t, w.agent.watch.Pods.Replace([]any{podOf("first", w.config.Node, "10.1.1.2"), podOf("second", w.config.Node, "10.1.2.2"), podOf("elsewhere", "other", "10.1.9.9")}, ""))
		w.turn()
		for _, step := range []struct{ cidr, named string }{
			{"10.1.1.0/24", "pods=[ns/second]"},
			{"10.1.1.0/24", ""},
			{"10.1.2.0/24", "pods=[ns/first]"},
			{"10.1.0.0/16", ""},
			{"10.2.0.0/16", `pods="[ns/first ns/second]"`},
		} {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.config.Node}, Spec: corev1.NodeSpec{PodCIDRs: []string{step.cidr}}}
			check(t, w.agent.watch.Nodes.Replace([]any{n}, ""))
			told.Reset()
			check(t, w.agent.sync.writeList())
			if got := told.String(); strings.Contains(got, "outside this Node's podCIDRs") != (step.named != "") || !strings.Contains(got, step.named) {
				t.Errorf("%s: told %q, want %s", step.cidr, got, step.named)
			}
		}
		w.agent.config.CNI = map[string]any{"ipam": map[string]any{"type": "host-local"}}
		told.Reset()
		check(t, w.agent.sync.writeList())
		if got := told.String(); strings.Contains(got, "outside") {
			t.Errorf("addresses are another's to give: %q", got)
		}
	})
}
