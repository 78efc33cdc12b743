// SPDX-License-Identifier: Apache-2.0

package store

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/mustang-net/mustang/internal/state"
)

func TestEndpointRecordsRoundTrip(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "mustang"))
	want := state.Endpoint{ID: 7, IfName: "eth0", Netns: "/x", IP4: netip.MustParseAddr("10.0.0.1"), Owner: state.OwnerCLI, MAC: []byte{1, 2, 3, 4, 5, 6}}
	if err := s.PutEndpoint(want); err != nil {
		t.Fatal(err)
	}
	// What a tool killed between write and rename leaves.
	if err := os.WriteFile(filepath.Join(s.Dir(), endpointsDir, tempPrefix+"x"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := s.Endpoints()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[uint32]state.Endpoint{7: want}, got, cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Fatal(d)
	}
	st, err := os.Stat(s.endpointFile(7))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatal(st, err)
	}
	for range 2 {
		if err := s.DeleteEndpoint(7); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(s.Dir()); !os.IsNotExist(err) {
		t.Fatal("the directory is still there")
	}
}

func TestJournalIsThereUntilCleared(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "mustang"))
	var got string
	if ok, err := s.ReadJournal(&got); ok || err != nil {
		t.Fatal(ok, err)
	}
	if err := s.WriteJournal("op"); err != nil {
		t.Fatal(err)
	}
	if ok, err := s.ReadJournal(&got); !ok || err != nil || got != "op" {
		t.Fatal(ok, err, got)
	}
	if err := s.ClearJournal(); err != nil {
		t.Fatal(err)
	}
	if ok, _ := s.ReadJournal(&got); ok {
		t.Fatal("still there")
	}
}

func TestWhatACrashOfTheMachineLeavesIsAbsent(t *testing.T) {
	s := At(t.TempDir())
	if err := s.PutEndpoint(state.Endpoint{ID: 7}); err != nil {
		t.Fatal(err)
	}
	whole := state.Service{ServiceID: state.ServiceID{Owner: state.OwnerCLI, Name: "whole"}}
	if err := s.PutService(whole); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{s.endpointFile(8), filepath.Join(s.dir, journalFile), s.serviceFile(state.ServiceID{Name: "half"})} {
		if err := os.WriteFile(path, []byte("\x00\x00"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	eps, err := s.Endpoints()
	if err != nil || len(eps) != 1 {
		t.Errorf("endpoints: %v, %v", eps, err)
	}
	if list, err := s.Services(); err != nil || len(list) != 1 || list[0].Name != whole.Name {
		t.Errorf("Services: %v, %v", list, err)
	}
	var v any
	if pending, err := s.ReadJournal(&v); pending || err != nil {
		t.Errorf("the journal: %t, %v", pending, err)
	}
}

// A directory that was made for it is root's alone, whoever of mustang's was there first, and one with a user's files
// stays as it is.
func TestMakeTakesADirectoryThatWasMadeForIt(t *testing.T) {
	for what, want := range map[string]os.FileMode{"": 0o700, "a user's file": 0o755,
		"cni": 0o700, "pods": 0o700, "agent.sock": 0o700, "tool.sock.new": 0o700, "gather": 0o700, journalFile: 0o700, scopeFile: 0o700, tempPrefix + nodesFile: 0o700} {
		s := At(filepath.Join(t.TempDir(), "state"))
		if err := os.Mkdir(s.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if what != "" {
			if err := os.WriteFile(filepath.Join(s.dir, what), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Make(); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(s.dir); err != nil || info.Mode().Perm() != want {
			t.Errorf("with %q in it: %v, %v, want %v", what, info.Mode(), err, want)
		}
	}
}

// What another user has put in a directory of his own is not carried out, nor does what root writes there follow his links.
func TestAnotherUsersDirectoryIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may give a file away")
	}
	s, victim := At(filepath.Join(t.TempDir(), "state")), filepath.Join(t.TempDir(), "victim")
	for _, err := range []error{os.Mkdir(s.dir, 0o755), s.WriteJournal("planted"), os.WriteFile(victim, []byte("whole"), 0o600),
		os.Symlink(victim, filepath.Join(s.dir, tempPrefix+nodesFile)), os.Chown(s.dir, 1000, 1000)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var op string
	_, read := s.ReadJournal(&op)
	for what, err := range map[string]error{"make": s.Make(), "read": read} {
		if err == nil || !strings.Contains(err.Error(), "the state directory "+s.dir+" belongs to user 1000") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.write(filepath.Join(s.dir, nodesFile), "x"); err == nil {
		t.Error("a link was followed")
	}
	if text, err := os.ReadFile(victim); string(text) != "whole" {
		t.Errorf("%q, %v", text, err)
	}
}

// Whose the store is, is nothing in it, goes with it, and is written without another file in its place.
func TestAStoreSaysWhoseItIs(t *testing.T) {
	s := At(filepath.Join(t.TempDir(), "state"))
	if f, err := s.OpenScope(true); f != nil || err != nil {
		t.Errorf("%v, %v", f, err)
	}
	f, err := s.OpenScope(false)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, dir := range []string{"", "/sys/fs/bpf/mustang", "/b"} {
		if err := SetBPFFS(f, dir); err != nil {
			t.Error(err)
		}
		if got, err := s.BPFFS(); got != dir || err != nil {
			t.Errorf("%q, %v; want %q", got, err, dir)
		}
	}
	if there, err := s.OpenScope(true); there == nil || err != nil {
		t.Error(err)
	} else {
		there.Close()
	}
	if err := s.Remove(); !s.Empty() || err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(s.dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there", s.dir)
	}
}
