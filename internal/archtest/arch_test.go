// SPDX-License-Identifier: Apache-2.0

// Package archtest holds the walls of ARCHITECTURE.md: imports point downward
// only.
package archtest

import (
	"cmp"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/mustang-net/mustang/"

// allowed says what a room may import of ours, besides its own subfolders. A
// room that is not listed is an error: say where it belongs.
var allowed = map[string][]string{
	"internal/state":             {},
	"internal/netns":             {},
	"internal/nft":               {},
	"internal/record":            {},
	"internal/ipam":              {},
	"internal/masquerade":        {"internal/nft"},
	"internal/archtest":          {},
	"internal/policy":            {"internal/state"},
	"internal/policy/oracle":     {},
	"internal/policy/kerneltest": {"internal"},
	"internal/policy/policygen":  {"internal/state", "internal/policy", "internal/policy/manifest", "internal/policy/oracle"},
	"internal/policy/manifest":   {"internal/policy", "internal/state"},
	"internal/store":             {"internal/state"},
	"internal/service":           {"internal/state"},
	"internal/datapath":          {"internal/state", "internal/netns"},
	"internal/datapath/bpfgen":   {},
	"internal/datapath/cgen":     {},
	"internal/datapath/dptest":   {"internal/datapath", "internal/state", "internal/netns"},
	"internal/reconcile":         {"internal/state", "internal/service", "internal/policy", "internal/datapath"},
	"internal/engine":            {"internal/state", "internal/service", "internal/policy", "internal/store", "internal/reconcile", "internal/datapath", "internal/netns", "internal/node", "internal/link", "internal/masquerade"},
	"internal/node":              {"internal/state", "internal/netns", "internal/nft"},
	"internal/observe":           {"internal/state", "internal/service", "internal/policy", "internal/store", "internal/datapath", "internal/netns", "internal/engine"},
	"internal/link":              {"internal/state", "internal/netns"},
	"internal/cni":               {"internal"},
	"internal/install":           {"internal/cni"},
	"internal/k8s":               {"internal/state"},
	"internal/agent":             {"internal"},
	"internal/cluster":           {"internal/k8s", "internal/agent", "internal/engine"},
	"internal/cluster/peer":      {},
	"lab":                        {"test/built"},
	"bench":                      {"lab", "test/kube", "test/built"},
	"test":                       {"lab"},
	"cmd/mustang":                {"internal", "lab", "bench"},
	"cmd/mustang-cni":            {"internal/cni"},
}

func TestImportsPointDownward(t *testing.T) {
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != ".." {
			return fs.SkipDir
		}
		if strings.HasSuffix(path, ".go") {
			checkFile(t, root, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func checkFile(t *testing.T, root, path string) {
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
	if err != nil {
		t.Error(err)
		return
	}
	dir, err := filepath.Rel(root, filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	room := roomOf(dir)
	for _, spec := range f.Imports {
		target, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		target, ours := strings.CutPrefix(target, module)
		if !ours || within(target, room) {
			continue
		}
		rules, known := allowed[room]
		if !known {
			t.Errorf("%s: the room %q is not in the list of allowed imports", path, room)
			return
		}
		ok := false
		for _, a := range rules {
			ok = ok || within(target, a)
		}
		if !ok {
			t.Errorf("%s imports %s, which %s may not", path, target, room)
		}
	}
}

// A list by netlink can lack something when it changes meanwhile; netns takes it
// again then, so lists are taken there.
var rawList = regexp.MustCompile(`\.(Link|Addr|Route|Neigh|Filter|Qdisc|Rule)List(Filtered)?\(`)

func TestListsByNetlinkAreTakenInOnePlace(t *testing.T) {
	root := filepath.Join("..")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") ||
			path == filepath.Join(root, "netns", "list.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if found := rawList.Find(text); found != nil {
			t.Errorf("%s calls %s, whose answer may lack something: take the list by internal/netns", path, found)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// roomOf is the longest listed room that dir lies in.
func roomOf(dir string) string {
	best := ""
	for room := range allowed {
		if within(dir, room) && len(room) > len(best) {
			best = room
		}
	}
	if best == "" {
		return dir
	}
	return best
}

func within(path, room string) bool { return path == room || strings.HasPrefix(path, room+"/") }

// TestDocsNameTestsThatExist: a page that says which test holds us to something
// must not go on saying so when the test has gone.
func TestDocsNameTestsThatExist(t *testing.T) {
	root := filepath.Join("..", "..")
	exists := map[string]bool{}
	define := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != ".." {
			return cmp.Or(err, fs.SkipDir)
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		for _, m := range define.FindAllSubmatch(text, -1) {
			exists[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatal(pages, err)
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		// `-run TestA|TestB` and `-run TestPolic` name a part of a name; in backquotes alone is a whole one.
		for _, m := range regexp.MustCompile("`(Test[A-Z]\\w+)`").FindAllSubmatch(text, -1) {
			if !exists[string(m[1])] {
				t.Errorf("%s names %s, which does not exist", page, m[1])
			}
		}
	}
}

// TestArchitectureNamesEachRoom: who looks for something finds the room that it is in, and no room that has gone.
func TestArchitectureNamesEachRoom(t *testing.T) {
	root := filepath.Join("..", "..")
	text, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rooms, _ := strings.Cut(string(text), "## Rooms")
	rooms, _, _ = strings.Cut(rooms, "## ")
	for _, house := range []string{"cmd", "internal", "test", "bench"} {
		entries, err := os.ReadDir(filepath.Join(root, house))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			name := "`" + house + "/" + e.Name() + "`"
			if house == "bench" { // all in one row
				name = "`" + e.Name() + "`"
			}
			if e.IsDir() && !strings.Contains(rooms, name) {
				t.Errorf("ARCHITECTURE.md does not name %s/%s", house, e.Name())
			}
		}
	}
	for _, m := range regexp.MustCompile("`((?:cmd|internal|test|bench)/[a-z0-9/-]+)`").FindAllStringSubmatch(rooms, -1) {
		if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
			t.Errorf("ARCHITECTURE.md names %s: %v", m[1], err)
		}
	}
}
