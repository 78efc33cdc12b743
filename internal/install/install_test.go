// SPDX-License-Identifier: Apache-2.0

package install

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestPlace(t *testing.T) {
	dir := t.TempDir()
	p := Place{BinDir: filepath.Join(dir, "bin"), ConfDir: filepath.Join(dir, "net.d"), ConfName: DefaultConfName}
	list, err := List(map[string]any{"mode": "veth", "ipam": map[string]any{"type": "mustang", "pools": []string{"10.1.0.0/24"}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := Check(list, func(field string) { t.Errorf("field %s is unknown", field) }); err != nil {
		t.Error(err)
	}
	// Without its capability a runtime gives the plugin no host ports, and says nothing.
	for _, capability := range []string{"portMappings", "ips", "mac"} {
		if !strings.Contains(string(list), `"`+capability+`": true`) {
			t.Errorf("the list does not ask for %s:\n%s", capability, list)
		}
	}
	if strings.Contains(string(list), "bandwidth") { // nobody in this list limits any
		t.Errorf("the list asks for what nobody does:\n%s", list)
	}
	if p.HasList(list) || p.HasList(nil) {
		t.Error("a place that is not there has something")
	}
	if _, err := p.PutPlugin([]byte("plugin")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.PutList(list); err != nil {
		t.Fatal(err)
	}
	if !p.HasList(list) || p.HasList(list[1:]) {
		t.Error("the list is not there, or another one is taken for it")
	}
	if others, err := p.Others(); err != nil || len(others) > 0 {
		t.Errorf("other networks: %v, %v", others, err)
	}
	other := filepath.Join(p.ConfDir, "10-bridge.conflist")
	write(t, other, `{"name": "b", "plugins": [{"type": "bridge"}]}`)
	if others, err := p.Others(); err != nil || len(others) != 1 || others[0] != other {
		t.Errorf("other networks: %v, %v", others, err)
	}
	removed, err := p.Remove()
	if err != nil || len(removed) != 2 || filepath.Base(removed[0]) != DefaultConfName {
		t.Errorf("removed %v, %v; want the list, then the plugin", removed, err)
	}
	if removed, err := p.Remove(); err != nil || len(removed) > 0 {
		t.Errorf("removed again: %v, %v", removed, err)
	}
	write(t, p.list(), `{"name": "b", "plugins": [{"type": "bridge"}]}`)
	if others, err := p.Others(); err != nil || len(others) != 2 || others[1] != p.list() {
		t.Errorf("another network's list under our name: %v, %v", others, err)
	}
	if _, err := p.Remove(); err == nil || !strings.Contains(err.Error(), "another network's") {
		t.Errorf("another network's list under our name: %v", err)
	}
}

// A killed install leaves what it was writing, and who owns the directory a link of that name.
func TestWhatIsInTheWayOfAnInstall(t *testing.T) {
	dir := t.TempDir()
	p := Place{BinDir: filepath.Join(dir, "bin"), ConfDir: filepath.Join(dir, "net.d"), ConfName: DefaultConfName}
	theirs := filepath.Join(dir, "theirs")
	write(t, theirs, "theirs")
	write(t, beside(p.list()), "half")
	if err := os.MkdirAll(p.BinDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(theirs, beside(p.plugin())); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(p.ConfDir, "old.conf"), 0o755); err != nil { // runtimes pass it over
		t.Fatal(err)
	}
	if others, err := p.Others(); err != nil || len(others) > 0 {
		t.Errorf("other networks: %v, %v", others, err)
	}
	if _, err := p.PutPlugin([]byte("plugin")); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(theirs); string(text) != "theirs" {
		t.Errorf("somebody else's file has %q, %v", text, err)
	}
	if st, err := os.Lstat(p.plugin()); err != nil || !st.Mode().IsRegular() || st.Mode().Perm() != 0o755 {
		t.Errorf("the plugin: %v, %v", st, err)
	}
	if _, err := p.Remove(); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{beside(p.list()), beside(p.plugin())} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
}

// What every ADD would refuse is no list to install.
func TestCheckRefusesWhatNoADDTakes(t *testing.T) {
	const own = `{"type": "mustang-cni", "ipam": {"type": "mustang", "pools": ["10.1.0.0/24"]}}`
	for text, says := range map[string]string{
		`{"cniVersion": "1.0.0", "name": "n", "plugins": [` + own + `]}`:                                                                                    "",
		`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "ptp"}, {"type": "mustang-cni", "mode": "chained"}]}`:                                    "",
		`{"cniVersion": "2.0.0", "name": "n", "plugins": [` + own + `]}`:                                                                                    "incompatible",
		`{"name": "n", "plugins": [` + own + `]}`:                                                                                                           "incompatible",
		`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "mustang-cni", "mode": "best", "ipam": {"type": "mustang", "pools": ["10.1.0.0/24"]}}]}`: "mode",
		`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "mustang-cni", "ipam": 7}]}`:                                                             "ipam",
		`{"cniVersion": "1.0.0", "plugins": [` + own + `]}`:                                                                                                 "name",
		`{"cniVersion": "1.0.0", "name": "a net", "plugins": [` + own + `]}`:                                                                                "name",
		`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "mustang-cni", "mode": "chained"}]}`:                                                     "place 1",
		`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "ptp"}, ` + own + `]}`:                                                                   "place 2",
		`{"cniVersion": "1.0.0", "name": "n", "type": "mustang-cni", "mode": "chained"}`:                                                                    "no network list",
	} {
		err := Check([]byte(text), nil)
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
}

// A single configuration with mustang in it is mustang's, and one of another plugin is not.
func TestASingleConfigurationIsAnothersOrOurs(t *testing.T) {
	dir := t.TempDir()
	p := Place{BinDir: filepath.Join(dir, "bin"), ConfDir: dir, ConfName: DefaultConfName}
	write(t, filepath.Join(dir, "05-ours.conf"), `{"cniVersion": "1.0.0", "name": "n", "type": "mustang-cni"}`)
	theirs := filepath.Join(dir, "10-theirs.conf")
	write(t, theirs, `{"cniVersion": "1.0.0", "name": "b", "type": "bridge"}`)
	if others, err := p.Others(); err != nil || len(others) != 1 || others[0] != theirs {
		t.Errorf("other networks: %v, %v; want %s", others, err, theirs)
	}
}
