// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/agent"
	"github.com/mustang-net/mustang/internal/engine"
)

// refused are commands that end with a sentence and a status, and change nothing.
type refused []struct {
	args []string
	code int
	want string
}

func (list refused) check(t *testing.T, w *tool, stdin string) {
	t.Helper()
	for _, c := range list {
		if out, errs, code := w.run(stdin, c.args...); code != c.code || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 || !strings.HasPrefix(errs, "mustang: ") {
			t.Errorf("%v: status %d, %q%q; want %d, %q", c.args, code, out, errs, c.code, c.want)
		}
	}
	if _, err := os.Stat(w.bpffs); !os.IsNotExist(err) {
		t.Error("they left something")
	}
}

func TestOneFileIsGiven(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(file, []byte("[]"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, group := range []string{"svc apply", "policy apply", "policy rm", "node apply"} {
		refused{
			{append(strings.Fields(group), "-f", "/none/such", "-f", file), 2, "is given twice, /none/such and " + file},
			{append(strings.Fields(group), "-f", ""), 2, "is empty"},
		}.check(t, newTool(t), "")
	}
}

func TestFlagsThatCannotBeReadSayWhatIsExpected(t *testing.T) {
	add := []string{"svc", "add", "--service", "10.96.0.1:80"}
	refused{
		{append(add, "--backend", ""), 2, "--backend is empty"},
		{append(add, "--backend", "10.1.1.1:80", "--backend", ""), 2, "--backend is empty"},
		{append(add, "--lb-ip", "192.0.2.1", "--source-range", ""), 2, "--source-range is empty"},
		{append(add, "--node-port", "99999"), 2, `--node-port: "99999" is not a number from 0 to 65535`},
		{[]string{"edge", "set", "--host", "--addresses", ""}, 2, "--addresses is empty"},
		{[]string{"node", "add", "n2", "--address", "10.3.0.2", "--pod-cidr", ""}, 2, "--pod-cidr is empty"},
		{[]string{"observe", "--pod", ""}, 2, "--pod is empty"},
		{[]string{"observe", "--last", "0"}, 2, "--last: 0 is not a number of packets"},
		{[]string{"install-cni", "--config", "x", "--masquerade=false"}, 2, "--masquerade has no meaning with --config"},
		{[]string{"install-cni", "--config", "x", "--pool", "10.1.0.0/24"}, 2, "--pool has no meaning with --config"},
		{[]string{"install-cni", "--plugin-only", "--adopt"}, 2, "--adopt has no meaning with --plugin-only"},
		{[]string{"install-cni", "--plugin-only", "--pool", "10.1.0.0/24"}, 2, "--pool has no meaning with --plugin-only"},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--local-cidr", ""}, 2, "--local-cidr is empty"},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--local-cidr", "0.0.0.0/0"}, 2, `--local-cidr: "0.0.0.0/0" is not a network`},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--local-cidr", "::ffff:10.1.0.0/120"}, 2, "is not a network"},
		{[]string{"connectivity", "test", "--nodes", ""}, 2, "--nodes is empty"},
	}.check(t, newTool(t), "")
}

func TestWrongUsageHasItsStatus(t *testing.T) {
	w := newTool(t)
	refused{
		{[]string{"edge", "set", "--host", "--ports", "65000-61000"}, 2, "FIRST-LAST"},
		{[]string{"lab", "up", "--mode", "foo"}, 2, `mode "foo" is unknown`},
		{[]string{"lab", "up", "--name", "A b"}, 2, `name "A b"`},
		{[]string{"lab", "up", "--nodes", "2", "--join", "foo"}, 2, `--join: "foo" is unknown: use direct or vxlan`},
		{[]string{"lab", "up", "--nodes", "2", "--host-routing", "foo"}, 2, "--host-routing"},
		{[]string{"ep", "add", "--ifname", "eth0", "--netns", "/nope"}, 2, "--netns: /nope is not a network namespace"},
		{[]string{"connectivity", "test", "--nodes", "a,b,c"}, 2, "--nodes: a,b,c are not two nodes"},
		{[]string{"connectivity", "test", "--nodes", "a", "--nodes", "a"}, 2, "--nodes: a,a are not two nodes"},
		{[]string{"connectivity", "load", "10.1.0.2:80", "--rate", "0"}, 2, "--rate: 0 is out of range"},
		{[]string{"connectivity", "load", "10.1.0.2:80", "--clients", "-1"}, 2, "--clients: -1 is out of range"},
		{[]string{"svc", "rm", "3", "--protocol", "udp"}, 2, "--protocol has no meaning with ids"},
		{[]string{"svc", "add", "--service", "10.96.0.1:80", "--external-policy", "Local"}, 2, "externalTrafficPolicy of service 10.96.0.1:80 is of clients outside"},
		{[]string{"svc", "add", "--service", "10.96.0.1:80", "--reset"}, 2, "--reset has no meaning without --replace"},
		{[]string{"observe", "--last", "3", "--sample", "2"}, 2, "--sample is of the flows that pass"},
		{[]string{"observe", "--verdict", "dropped", "--sample", "2"}, 2, "--sample is of the flows that pass"},
		{[]string{"observe", "--service", "fe80::1%eth0"}, 2, `--service: "fe80::1%eth0" has a zone, which packets do not tell; leave %eth0 out`},
		{[]string{"why", "fe80::1%eth0", "10.1.0.2"}, 2, `SRC: "fe80::1%eth0" has a zone`},
		{[]string{"why", "10.1.0.2", "[fe80::1%eth0]:80/udp"}, 2, `DST: "fe80::1%eth0" has a zone`},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--bridge", "br5"}, 2, "--bridge has no meaning in mode veth"},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--plain", "--labels", "app=a"}, 2, "--labels has no meaning with --plain"},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--plain", "--masquerade"}, 2, "--masquerade has no meaning with --plain"},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--mode", "foo", "--uplink", "eth0"}, 2, `mode "foo"`},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--mode", "bridge", "--uplink", "eth0"}, 2, "--uplink has no meaning in mode bridge"},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--local-cidr", "10.1.0.0/24", "--local-mtu", "off"}, 2, "--local-cidr has no meaning"},
		{[]string{"pod", "add", "a", "--ip", "10.1.0.2", "--masquerade", "--masquerade-exclude", "::ffff:10.0.0.0/104"}, 2, "is not a network"},
		{[]string{"edge", "set", "--host", "--addresses", "192.0.2.0/24"}, 2, "--addresses has no meaning without --dev"},
		{[]string{"status", "--kubeconfig", "/none"}, 2, "--kubeconfig has no meaning without --cluster"},
		{[]string{"help", "foo"}, 2, `unknown command "foo"`},
		{[]string{"help", "svc", "foo"}, 2, "`mustang svc --help`"},
		{[]string{"completion", "foo"}, 2, `unknown command "foo"`},
		{[]string{"noode"}, 2, "`mustang node`"},
		{[]string{"version"}, 2, "`mustang --version`"},
	}.check(t, w, "")
	refused{
		{[]string{"node", "apply", "-f", "-"}, 2, `standard input: settings: host routing "foo" is unknown`},
	}.check(t, w, "settings: {hostRouting: foo}\nnodes: []\n")
	for _, args := range [][]string{nil, {"help"}, {"help", "svc", "add"}, {"svc"}, {"completion", "bash"}} {
		if out := w.ok(args...); !strings.Contains(out, "mustang") {
			t.Errorf("%v: %q", args, out)
		}
	}
}

func TestAPolicyIsRemovedOnceThoughNamedTwice(t *testing.T) {
	w := newTool(t)
	const deny = "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: deny, namespace: default}, spec: {podSelector: {}}}"
	if _, errs, code := w.run(deny, "policy", "apply", "-f", "-"); code != 0 {
		t.Fatal(errs)
	}
	w.ok("policy", "rm", "default/deny", "deny")
	if out := w.ok("policy", "ls", "-o", "json"); strings.TrimSpace(out) != "[]" {
		t.Error(out)
	}
}

func TestAFileIsWrongInItsOwnWords(t *testing.T) {
	w := newTool(t)
	good := `{service: "10.96.0.1:80", backends: []}`
	for text, want := range map[string]string{
		`[` + good + `, {service: "10.96.0.2:80", nodePort: 65536}]`: "entry 2: nodePort: there is the number 65536 where a number from 0 to 65535 belongs",
		`[{service: "10.96.0.2:80", backends: "10.1.1.1:80"}]`:       "entry 1: backends: there is a word where a list, as [A, B], belongs",
		`[{service: "10.96.0.2:80", bogus: 1}]`:                      `entry 1: unknown field "bogus"; the fields are service, protocol, backends`,
		`["10.96.0.2:80"]`:                                           "entry 1: there is a word where {service, protocol",
		`{service: "10.96.0.2:80"}`:                                  "standard input is not a list",
	} {
		refused{{[]string{"svc", "apply", "-f", "-"}, 2, want}}.check(t, w, text)
	}
	for text, want := range map[string]string{
		`nodes: [{name: n1, addresses: 10.3.0.1}]`: "entry 1: addresses: there is a word where a list",
		`nodes: [{name: n1, bogus: 1}]`:            `entry 1: unknown field "bogus"`,
		`{settings: {port: x}, nodes: []}`:         "settings: port: there is a word where a whole number belongs",
		`{settings: {bogus: x}, nodes: []}`:        `unknown field "bogus"; the fields are hostRouting`,
		`{nodes: 1}`:                               "nodes: there is a number where a list",
	} {
		refused{{[]string{"node", "apply", "-f", "-"}, 2, want}}.check(t, w, text)
	}
	const deny = "# a comment\n---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: deny, namespace: shop}\n"
	for text, want := range map[string]string{
		"spec: {podSelectr: {}}": `NetworkPolicy shop/deny: unknown field "spec.podSelectr"`,
		`spec: {podSelector: {}, ingress: [{ports: [{endPort: "90"}]}]}`: "shop/deny: spec.ingress.ports.endPort: there is a word where a whole number belongs",
		"spec: {podSelector: {}, ingress: {}}":                           "shop/deny: spec.ingress: there is a mapping where a list",
		"spec: []":                                                       "shop/deny: spec: there is a list where {podSelector, ingress, egress, policyTypes} belongs",
		"spec: {podSelector: {},\nbad: a: b}":                            "line 6: did not find",
		"spec: {podSelector: {}}\nspec: {}":                              "line 7: key \"spec\" already set in map",
	} {
		refused{{[]string{"policy", "apply", "-f", "-"}, 2, want}}.check(t, w, deny+text)
	}
	refused{
		{[]string{"policy", "apply", "-f", "-"}, 2, "Namespace shop: metadata.labels: there is a list where a mapping belongs"},
	}.check(t, w, "{apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: [a]}}")
	refused{{[]string{"svc", "apply", "-f", "-"}, 2, "standard input has no list"}}.check(t, w, "")
}

func TestWrongArgumentsSayWhichAreMeant(t *testing.T) {
	refused{
		{[]string{"pod", "add"}, 2, "wrong number of arguments, 0; write `mustang pod add NAME [flags]`"},
		{[]string{"pod", "add", "x", "--big-tcp", "524280"}, 2, "--big-tcp=524280"},
		{[]string{"svc", "apply", "f.yaml"}, 2, "-f f.yaml"},
		{[]string{"policy", "apply", "f.yaml"}, 2, "-f f.yaml"},
		{[]string{"svc", "ls", "x"}, 2, "`mustang svc ls"},
		{[]string{"lab", "run"}, 2, "COMMAND"},
		{[]string{"node", "rm"}, 2, "`mustang node rm NAME"},
	}.check(t, newTool(t), "")
}

func TestASentenceNamesWhatWasGiven(t *testing.T) {
	w := newTool(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", "/none/such")
	t.Setenv("HOME", "/none")
	refused{
		{[]string{"status", "--cluster"}, 1, "name one by --kubeconfig or $KUBECONFIG"},
		{[]string{"svc", "ls", "--state-dir", file}, 2, "--state-dir: " + file + " is no directory"},
		{[]string{"svc", "ls", "--state-dir", filepath.Join(file, "x")}, 2, "--state-dir"},
		{[]string{"svc", "add", "--service", "10.96.0.1:80", "--external-ip", "127.0.0.1"}, 2, "external IP 127.0.0.1 of service 10.96.0.1:80: a loopback"},
		{[]string{"pod", "add", "x", "--ip", "fe80::7"}, 2, "IP fe80::7 cannot be a pod's: with a link-local"},
	}.check(t, w, "")
}

// As svc add has it.
func TestIPv4WrittenAsIPv6IsIPv4(t *testing.T) {
	for _, text := range []string{"::ffff:10.1.0.99", "::ffff:10.1.0.99/128"} {
		if v4, v6, err := parsePair("--ip", text, false); err != nil || v4.String() != "10.1.0.99/32" || v6.IsValid() {
			t.Errorf("%s: %s, %s, %v", text, v4, v6, err)
		}
	}
	w := newTool(t)
	w.ok("node", "add", "n2", "--address", "::ffff:10.3.0.2")
	if out := w.ok("node", "ls"); !strings.Contains(out, " 10.3.0.2 ") {
		t.Error(out)
	}
}

// An agent has had its Services all along: nothing is restored when they are listed.
func TestServicesAreRestoredByANewProcessAlone(t *testing.T) {
	w := newTool(t)
	w.ok("svc", "add", "--service", "10.96.0.1:80", "--backend", "10.0.0.1:80")
	if _, errs, _ := w.run("", "svc", "ls"); errs != "Services restored from maps\n" {
		t.Errorf("a new process says %q", errs)
	}
	e, err := engine.Open(t.Context(), engine.Scope{BPFFS: w.bpffs, StateDir: w.state}, engine.Options{Notify: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	args := []string{"--bpffs=" + w.bpffs, "--state-dir=" + w.state, "svc", "ls"}
	if a := runCall(t.Context(), e, agent.Call{Args: args})(); a.Code != 0 || len(a.Err) != 0 || !strings.Contains(string(a.Out), "10.96.0.1") {
		t.Errorf("an agent says %q, %q", a.Out, a.Err)
	}
	for _, args := range [][]string{{"edge", "set", "--dev", "lo"}, {"edge", "rm"}} {
		args := append([]string{"--bpffs=" + w.bpffs, "--state-dir=" + w.state}, args...)
		if a := runCall(t.Context(), e, agent.Call{Args: args})(); a.Code != 1 || !strings.Contains(string(a.Err), "the agent of this node keeps the edge") {
			t.Errorf("%v: an agent says %q, status %d", args, a.Err, a.Code)
		}
	}
}
