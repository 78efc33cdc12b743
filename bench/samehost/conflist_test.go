// SPDX-License-Identifier: Apache-2.0

package samehost

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/bench/runner"
)

const bridgeConflist = `{"cniVersion":"1.0.0","name":"ref-bridge","plugins":[
 {"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":false,
  "ipam":{"type":"host-local","ranges":[[{"subnet":"10.1.0.0/16"}],[{"subnet":"fd00:10:1::/64"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}},
 {"type":"tuning"}]}`

func writeConflist(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "test.conflist")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestReferencePluginsAsContestant runs Debian's bridge plugin with Services by
// iptables, over both families.
func TestReferencePluginsAsContestant(t *testing.T) {
	o := short(t)
	if _, err := os.Stat("/usr/lib/cni/bridge"); err != nil {
		t.Skip("needs the package containernetworking-plugins")
	}
	o.Binary, o.Rounds, o.ServicesBy, o.Services = os.Args[0], 1, []string{"iptables-nft"}, []int{1}
	o.Conflists = []string{writeConflist(t, bridgeConflist)}
	for _, o.IPv6 = range []bool{false, true} {
		doc, err := testRun(t, t.Context(), o)
		if err != nil {
			t.Fatalf("%v: %v", err, doc)
		}
		for _, via := range []string{"pod IP", "ClusterIP"} {
			id := "cni ref-bridge iptables-nft, " + via
			if !slices.ContainsFunc(doc.Samples, func(s runner.Sample) bool { return s.Subject == id && s.Usable() }) {
				t.Errorf("no usable sample of %q (IPv6: %v)", id, o.IPv6)
			}
		}
		backend := doc.Subjects[len(doc.Subjects)-1].Backend
		if !strings.Contains(backend, "bridge + tuning") || !strings.Contains(backend, "iptables") {
			t.Errorf("the backend is %q", backend)
		}
	}
	if left, _ := filepath.Glob(fmt.Sprintf("%s/mustang-bench-%d-*", hostLocalDir, os.Getpid())); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A killed run's addresses go, a living one's stay.
func TestAddressesOfKilledRunsGo(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	dir := func(pid int) string {
		path := filepath.Join(hostLocalDir, fmt.Sprintf("%s%d-test", networkPrefix, pid))
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(path) })
		return path
	}
	left, mine := dir(dead.ProcessState.Pid()), dir(os.Getpid())
	if err := removeDead(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", left, err)
	}
	if _, err := os.Stat(mine); err != nil {
		t.Errorf("a living run's: %v", err)
	}
}

func TestConflistThatCannotWorkIsRefusedBeforeTheRun(t *testing.T) {
	for text, want := range map[string]string{
		`{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"no-such-plugin"}]}`: "no-such-plugin is in none of",
		`{"cniVersion":"1.0.0"`: "--conflist",
	} {
		o := Defaults()
		o.Modes, o.Conflists = nil, []string{writeConflist(t, text)}
		if _, err := o.contestants(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// Two networks of one name would be one contestant, whose halves end each other.
func TestConflistsOfOneNameAreRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "bridge"), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	list := func(name string) string {
		return writeConflist(t, `{"cniVersion":"1.0.0","name":"`+name+`","plugins":[{"type":"bridge"}]}`)
	}
	o := Defaults()
	o.Modes, o.CNIPath, o.Conflists = nil, []string{dir}, []string{list("a"), list("b")}
	if _, err := o.contestants(); err != nil {
		t.Fatal(err)
	}
	o.Conflists = append(o.Conflists, list("a"))
	if _, err := o.contestants(); err == nil || !strings.Contains(err.Error(), `are both called "a"`) {
		t.Errorf("%v, want the two named", err)
	}
}
