// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/state"
)

// views is what `svc ls -o json` prints, by kind.
func (w *tool) views() map[string]serviceView {
	w.t.Helper()
	var list []serviceView
	if err := json.Unmarshal([]byte(w.ok("svc", "ls", "-o", "json")), &list); err != nil {
		w.t.Fatal(err)
	}
	out := make(map[string]serviceView)
	for _, v := range list {
		out[v.Kind.String()] = v
	}
	if len(out) != len(list) {
		w.t.Fatalf("%+v", list)
	}
	return out
}

func TestAServiceWithEverything(t *testing.T) {
	w := newTool(t)
	add := []string{"svc", "add", "--service", "10.96.0.1:80", "--protocol", "tcp", "--backend", "10.0.0.1:8080", "--backend", "10.0.0.2:8080",
		"--node-port", "30080", "--external-ip", "192.0.2.1", "--lb-ip", "192.0.2.2", "--source-range", "198.51.100.0/24",
		"--affinity", "3h", "--external-policy", "local", "--algorithm", "maglev"}
	w.ok(add...)
	list := w.views()
	if len(list) != 4 {
		t.Fatalf("%+v", list)
	}
	for kind, v := range list {
		external := kind != "ClusterIP"
		if v.Name != "tcp 10.96.0.1:80" || v.Affinity != "3h0m0s" || v.Algorithm.String() != "maglev" || len(v.Backends) != 2 ||
			(v.Outside != nil) != external || external && len(*v.Outside) != 0 || (len(v.SourceRanges) > 0) != (kind == "LoadBalancer") ||
			v.External != "Local" {
			t.Errorf("%s: %+v", kind, v)
		}
	}
	if wide := w.ok("svc", "ls", "-o", "wide"); !strings.Contains(wide, "198.51.100.0/24") || !strings.Contains(wide, "external Local") || !strings.Contains(wide, "NodePort") {
		t.Error(wide)
	}
	var status struct{ Services int }
	if err := json.Unmarshal([]byte(w.ok("status", "-o", "json")), &status); err != nil || status.Services != len(list) {
		t.Errorf("status counts %d, %v; svc ls has %d", status.Services, err, len(list))
	}
	if _, errs, code := w.run("", add...); code != 1 || !strings.Contains(errs, "duplicate") {
		t.Errorf("%d: %s", code, errs)
	}
	// Changed to less, nothing of the rest is left; and its record is gone with it.
	w.ok("svc", "add", "--replace", "--service", "10.96.0.1:80", "--protocol", "tcp", "--backend", "10.0.0.1:8080")
	if list := w.views(); len(list) != 1 || list["ClusterIP"].Affinity+list["ClusterIP"].External != "" || len(list["ClusterIP"].Backends) != 1 {
		t.Errorf("%+v", list)
	}
	w.ok("svc", "add", "--replace", "--service", "10.96.0.1:80", "--protocol", "tcp", "--internal-policy", "local")
	if list := w.views(); list["ClusterIP"].Internal != "Local" {
		t.Errorf("%+v", list)
	}
	w.ok("svc", "add", "--replace", "--service", "10.96.0.1:80", "--protocol", "tcp", "--backend", "10.0.0.1:8080")
	if left, _ := os.ReadDir(filepath.Join(w.state, "services")); len(left) != 0 {
		t.Errorf("%v", left)
	}
	// Removed by any of its frontends, all go.
	w.ok(append(add, "--replace")...)
	w.ok("svc", "rm", "--service", "192.0.2.2:80")
	if list := w.views(); len(list) != 0 {
		t.Errorf("%+v", list)
	}
}

func TestServicesOfAFile(t *testing.T) {
	w := newTool(t)
	file := filepath.Join(t.TempDir(), "services.yaml")
	text := `
- service: "[fd96::1]:53"
  protocol: udp
  backends: ["[fd00::1]:53"]
  nodePort: 30053
  externalIPs: ["2001:db8::1"]
  loadBalancerIPs: ["2001:db8::2"]
  sourceRanges: ["2001:db8:1::/48"]
  affinity: 90s
  internalTrafficPolicy: Local
  externalTrafficPolicy: Cluster
  algorithm: random
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w.ok("svc", "apply", "-f", file)
	list := w.views()
	if len(list) != 4 || !list["ClusterIP"].Drop || list["NodePort"].Service != "::" || list["NodePort"].Port != 30053 || list["ExternalIP"].Affinity != "1m30s" {
		t.Errorf("%+v", list)
	}
}

func TestSCTPHasItsOwnServices(t *testing.T) {
	w := newTool(t)
	add := []string{"svc", "add", "--service", "10.96.0.1:80", "--backend", "10.0.0.1:8080"}
	w.ok(append(add, "--node-port", "30080", "--protocol", "sctp")...)
	list := w.views()
	if got := list["NodePort"]; got.Protocol != state.SCTP || got.Port != 30080 {
		t.Errorf("%+v", list)
	}
	w.ok(add...)                                   // TCP and UDP, not SCTP again
	w.ok("svc", "rm", "--service", "10.96.0.1:80") // whichever exist
	if list := w.views(); len(list) != 0 {
		t.Errorf("%+v", list)
	}
}

func TestWrongServicesNameFieldAndMend(t *testing.T) {
	w := newTool(t)
	base := []string{"svc", "add", "--service", "10.96.0.1:80", "--protocol", "tcp"}
	for want, args := range map[string][]string{
		"affinity \"3 hours\"":      {"--affinity", "3 hours"},
		"externalTrafficPolicy":     {"--external-policy", "remote"},
		"source range \"10.0.0.0\"": {"--lb-ip", "192.0.2.1", "--source-range", "10.0.0.0"},
		"no load balancer IP":       {"--source-range", "10.0.0.0/8"},
		"is IPv6":                   {"--external-ip", "2001:db8::1"},
		"names the address":         {"--external-ip", "10.96.0.1"},
		"multicast":                 {"--external-ip", "224.0.0.1"},
		"none of random, maglev":    {"--algorithm", "roundrobin"},
		"\"web\" of service":        {"--lb-ip", "web"},
	} {
		if _, errs, code := w.run("", append(base, args...)...); code != 2 || !strings.Contains(errs, want) {
			t.Errorf("%v: status %d, %q, want %q", args, code, errs, want)
		}
	}
	// Two Services cannot have one node port: nothing of the second takes effect.
	w.ok("svc", "add", "--service", "10.96.0.2:80", "--protocol", "tcp", "--node-port", "30080")
	if _, errs, code := w.run("", append(base, "--node-port", "30080")...); code != 1 || !strings.Contains(errs, "tcp 0.0.0.0:30080 belongs to cli's Service tcp 10.96.0.2:80; choose another, or remove that Service") {
		t.Errorf("status %d: %s", code, errs)
	}
	if out := w.ok("svc", "ls"); strings.Contains(out, "10.96.0.1") {
		t.Error(out)
	}
	for want, args := range map[string][]string{
		"give --dev":       {"edge", "set"},
		"is not a CIDR":    {"edge", "set", "--dev", "lo", "--addresses", "x"},
		"FIRST-LAST":       {"edge", "set", "--dev", "lo", "--ports", "many"},
		"interface \"no\"": {"edge", "set", "--dev", "no"},
		"loopback":         {"edge", "set", "--dev", "lo"},
	} {
		if _, errs, code := w.run("", args...); code == 0 || !strings.Contains(errs, want) {
			t.Errorf("%v: status %d, %q, want %q", args, code, errs, want)
		}
	}
}

func TestTheEdgeByCommand(t *testing.T) {
	w := newTool(t)
	w.sh("ip -n %s link add nic0 type veth peer name wire0 && ip -n %s link set nic0 up && ip -n %s addr add 192.0.2.1/24 dev nic0 && ip -n %s addr add 2001:db8::1/64 dev nic0 nodad",
		w.netns, w.netns, w.netns, w.netns)
	w.ok("edge", "set", "--dev", "nic0", "--addresses", "192.0.2.0/24", "--ports", "62000-62999")
	var v edgeView
	if err := json.Unmarshal([]byte(w.ok("edge", "show", "-o", "json")), &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Devices) != 1 || v.Devices[0] != "nic0" || len(v.Addresses) != 1 || len(v.Wears) != 2 || v.Ports != "62000-62999" || v.Host {
		t.Errorf("%+v", v)
	}
	if out := w.ok("edge", "show"); !strings.Contains(out, "nic0") {
		t.Error(out)
	}
	for ports, want := range map[string]string{"1-2": "lie below", "40000-41000": "of which the edge uses some", "62000-62999": ""} {
		_, errs, code := w.run("", "edge", "set", "--dev", "nic0", "--ports", ports)
		if code != 0 || !strings.Contains(errs, want) || (want == "") != (errs == "") {
			t.Errorf("%s: status %d, %q", ports, code, errs)
		}
	}
	w.ok("edge", "rm")
	v = edgeView{}
	if err := json.Unmarshal([]byte(w.ok("edge", "show", "-o", "json")), &v); err != nil || len(v.Devices)+len(v.Addresses) != 0 {
		t.Errorf("%+v, %v", v, err)
	}
}
