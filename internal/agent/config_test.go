// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

func TestConfigFile(t *testing.T) {
	for _, c := range []struct {
		name, text string
		says       string // in the error; "": it is right
	}{
		{"empty", "", ""},
		{"whole", "node: n1\nstate-dir: /run/x\nbpffs: /sys/fs/bpf/x\nnode-mode: vxlan\nhealth-address: none\nlog-level: debug", ""},
		{"an unknown name", "nodename: n1", `unknown field "nodename"`},
		{"no YAML", "node: [", "configuration"},
		{"another type", "node: {a: b}", "configuration"},
		{"no node", "node: ''", "node is empty"},
		{"a file that is not there", "kubeconfig: /nowhere/at-all", "/nowhere/at-all"},
		{"a relative directory", "state-dir: run", `state-dir "run" is not an absolute path`},
		{"an address without a port", "health-address: 127.0.0.1", `health-address "127.0.0.1"`},
		{"a port that is any", "health-address: 127.0.0.1:0", `health-address "127.0.0.1:0"`},
		{"a zone", "metrics-address: '[fe80::1%eth0]:1'", `metrics-address "[fe80::1%eth0]:1"`},
		{"a name for an address", "metrics-address: localhost:1", `metrics-address "localhost:1"`},
		{"a mode that there is not", "node-mode: bgp", `node-mode "bgp" is none of`},
		{"a way of forwarding that there is not", "host-routing: xdp", `host-routing: host routing "xdp"`},
		{"no way of forwarding", "host-routing: ''", "host-routing is empty"},
		{"a number that VXLAN has not", "vxlan-vni: 16777216", "vxlan-vni: VNI 16777216 is out of range"},
		{"a port that UDP has not", "vxlan-port: 65536", "vxlan-port: port 65536 is out of range"},
		{"the port 0", "vxlan-port: 0", "0 is out of range for vxlan-vni and vxlan-port"},
		{"found devices and others", "node-devices: [auto, eth0]", "node-devices is neither auto alone"},
		{"no devices", "node-devices: []", "node-devices is neither auto alone"},
		{"between nodes", "host-routing: legacy\nvxlan-vni: 16777215\nvxlan-port: 8472\nnode-devices: [eth0, eth1]", ""},
		{"an address that is no network", "node-port-addresses: [eth0]", `node-port-addresses "eth0"`},
		{"none and others", "devices: [none, eth0]", "devices has none beside others"},
		{"a network list of its own", "cni-conf-dir: /etc/cni/net.d\ncni: {mode: bridge, mtu: 1400}", ""},
		{"a list behind another plugin's", "cni-conf-dir: /etc/cni/net.d\ncni: {mode: chained}", "mode chained is behind another plugin"},
		{"a level that there is not", "log-level: loud", `log-level "loud" is none of`},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "agent.yaml")
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			config, err := Defaults().Read(path)
			if err == nil {
				err = config.Check()
			}
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v; want %q", err, c.says)
			}
		})
	}
}

// Settings that a file does not name keep their values.
func TestConfigFileKeepsTheRest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(path, []byte("log-level: warn"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := Defaults()
	want.LogLevel, want.file, want.text = "warn", path, []byte("log-level: warn")
	if got, err := Defaults().Read(path); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}

// What stands behind a document of comments is read; settings in two documents are not
// half of them.
func TestConfigIsOneDocument(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	for text, node := range map[string]string{"---\n# ours\n---\nnode: a\n": "a", "node: a\n---\n# end\n": "a", "# nothing\n": Defaults().Node, "node: a\n---\nnode-mode: vxlan\n": ""} {
		must(t, os.WriteFile(path, []byte(text), 0o600))
		c, err := Defaults().Read(path)
		if (err != nil) != (node == "") || err == nil && c.Node != node {
			t.Errorf("%q: node %q, %v", text, c.Node, err)
		}
	}
}

// A ConfigMap that is changed reaches no agent that runs: each says so, once, with the mend.
func TestAnotherConfigurationOnDiskIsNamed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	w := newScripted(t)
	defer w.close()
	var told bytes.Buffer
	w.agent.log = slog.New(slog.NewTextHandler(&told, nil))
	path := filepath.Join(t.TempDir(), "agent.yaml")
	looks := func(when, text string, named bool, warned int) {
		t.Helper()
		if text != "" {
			must(t, os.WriteFile(path, []byte(text), 0o600))
		}
		w.agent.lookAtConfig()
		sentences := w.agent.healthy().Problems["configuration "+path]
		if got := strings.Contains(strings.Join(sentences, ""), "rollout restart ds/mustang"); got != named {
			t.Errorf("%s: /healthz says %q, want it named: %v", when, sentences, named)
		}
		if got := strings.Count(told.String(), "rollout restart ds/mustang"); got != warned {
			t.Errorf("%s: told %q, want %d warnings", when, told.String(), warned)
		}
	}
	looks("without a file", "", false, 0)
	must(t, os.WriteFile(path, []byte("log-level: warn"), 0o600))
	config, err := w.config.Read(path)
	must(t, err)
	w.agent.config = config
	looks("as it was read", "", false, 0)
	looks("changed", "log-level: info", true, 1)
	looks("later", "", true, 1)
	looks("changed back", "log-level: warn", false, 1)
	must(t, os.Remove(path))
	looks("away", "", false, 1)
}

// The chart takes no listen address that its agents would refuse, and refuses none that a user may mean.
func TestTheChartsListenAddressesAreTheAgents(t *testing.T) {
	text, err := os.ReadFile("../../deploy/chart/mustang/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		Definitions struct{ Listen struct{ Pattern string } }
	}
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	pattern := regexp.MustCompile(schema.Definitions.Listen.Pattern)
	for address, want := range map[string]bool{
		"none": true, "127.0.0.1:10249": true, "0.0.0.0:1": true, "255.255.255.255:65535": true, "[::]:10249": true, "[::1]:10249": true, "[2001:db8::1]:9": true,
		"[1:2:3:4:5:6:7:8]:9": true, "[1::8]:9": true, "[1:2:3:4:5:6:7::]:9": true, "[::2:3:4:5:6:7:8]:9": true, "[1:2::5:6:7:8]:9": true, "[fd00::AbCd]:9": true, "[::ffff:127.0.0.1]:9": true,
		"": false, "None": false, "localhost:10249": false, ":10249": false, "*:10249": false, "127.0.0.1": false, "10249": false, "127.0.0.1:": false, "127.0.0.1:http": false,
		"127.0.0.1:65536": false, "127.0.0.1:102490": false, "127.0.0.1:-1": false, "256.0.0.1:9": false, "1.2.3:9": false, "01.2.3.4:9": false, "1.2.3.4.5:9": false,
		"::1:10249": false, "[::1]": false, "[1.2.3.4]:9": false, "[1::2::3]:9": false, "[:::]:9": false, "[1:2:3:4:5:6:7:8:9]:9": false, "[1:2:3:4:5:6:7]:9": false, "[1:2:3:4::5:6:7:8]:9": false,
		"[12345::]:9": false, "[g::]:9": false, "[:1]:9": false, " 127.0.0.1:9": false, "127.0.0.1:9 ": false,
	} {
		if agent, chart := checkAddress("x", address) == nil, pattern.MatchString(address); agent != want || chart != want {
			t.Errorf("%q: the agent takes it: %t, the chart: %t, want %t", address, agent, chart, want)
		}
	}
}
