// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
