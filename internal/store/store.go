// SPDX-License-Identifier: Apache-2.0

// Package store keeps what the maps cannot: where an endpoint's namespace is
// and what its interface is called, Services that are more than their
// frontends, and the journal of the operation under way.
// Each file, but the ScopeFile, is replaced atomically, so that a tool killed at any instant leaves
// the old content or the new. Nothing is forced to a disk: tables, programs and
// namespaces, which the files are about, end with the machine's run. What a
// crash of the machine leaves of a file is taken for absent.
package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/mustang-net/mustang/internal/state"
)

const (
	journalFile  = "journal.json"
	policiesFile = "policies.json"
	endpointsDir = "endpoints"
	nodesFile    = "nodes.json"
	namesFile    = "policy-names.json"
	servicesDir  = "services"
	scopeFile    = "scope.lock"
	tempPrefix   = ".new-"
)

// Store is one node's directory.
type Store struct{ dir string }

// At is the store in dir, which need not exist yet.
func At(dir string) Store { return Store{dir} }

// Dir is the directory of the store.
func (s Store) Dir() string { return s.dir }

// Endpoints reads every endpoint record, by id. Temporary files of a killed
// tool are removed, so the caller holds the scope's lock.
func (s Store) Endpoints() (map[uint32]state.Endpoint, error) {
	left, _ := filepath.Glob(filepath.Join(s.dir, endpointsDir, tempPrefix+"*"))
	for _, file := range left {
		os.Remove(file)
	}
	return s.LookEndpoints()
}

// LookEndpoints is Endpoints for who does not hold the lock.
func (s Store) LookEndpoints() (map[uint32]state.Endpoint, error) {
	dir := filepath.Join(s.dir, endpointsDir)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read endpoint records: %w", err)
	}
	out := make(map[uint32]state.Endpoint, len(entries))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			continue
		}
		id, err := strconv.ParseUint(strings.TrimSuffix(e.Name(), ".json"), 10, 32)
		if err != nil {
			continue // not ours
		}
		var ep state.Endpoint
		err = readJSON(filepath.Join(dir, e.Name()), &ep)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		if err != nil {
			return nil, fmt.Errorf("endpoint record %d: %w; remove that file to forget the endpoint", id, err)
		}
		ep.ID = uint32(id)
		out[ep.ID] = ep
	}
	return out, nil
}

// PutEndpoint writes the record of ep.
func (s Store) PutEndpoint(ep state.Endpoint) error {
	return s.write(s.endpointFile(ep.ID), ep)
}

// DeleteEndpoint removes a record; an absent one is success.
func (s Store) DeleteEndpoint(id uint32) error { return remove(s.endpointFile(id)) }

func (s Store) endpointFile(id uint32) string {
	return filepath.Join(s.dir, endpointsDir, strconv.FormatUint(uint64(id), 10)+".json")
}

// Services reads every record of a Service, by name.
func (s Store) Services() ([]state.Service, error) {
	dir := filepath.Join(s.dir, servicesDir)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read records of Services: %w", err)
	}
	var out []state.Service
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), tempPrefix) {
			os.Remove(path)
			continue
		}
		var svc state.Service
		err := readJSON(path, &svc)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since, or half of it
		}
		if err != nil {
			return nil, fmt.Errorf("record of a Service: %w; remove that file to keep only its frontends", err)
		}
		out = append(out, svc)
	}
	return out, nil
}

// PutService writes the record of svc.
func (s Store) PutService(svc state.Service) error {
	return s.write(s.serviceFile(svc.ServiceID), svc)
}

// DeleteService removes a record; an absent one is success.
func (s Store) DeleteService(id state.ServiceID) error { return remove(s.serviceFile(id)) }

func (s Store) serviceFile(id state.ServiceID) string {
	return filepath.Join(s.dir, servicesDir, url.PathEscape(id.Owner.String()+" "+id.String())+".json")
}

// HasService says whether a Service has a record.
func (s Store) HasService(id state.ServiceID) bool {
	_, err := os.Stat(s.serviceFile(id))
	return err == nil
}

// ReadJournal reads the operation that was under way into v; false: none was.
// What a killed tool was about to make the journal is removed.
func (s Store) ReadJournal(v any) (bool, error) {
	if err := s.checkOwner(); err != nil {
		return false, err
	}
	os.Remove(filepath.Join(s.dir, tempPrefix+journalFile))
	err := readJSON(filepath.Join(s.dir, journalFile), v)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// WriteJournal records the operation v before its first effect.
func (s Store) WriteJournal(v any) error { return s.write(filepath.Join(s.dir, journalFile), v) }

// ClearJournal says that the operation is complete.
func (s Store) ClearJournal() error { return remove(filepath.Join(s.dir, journalFile)) }

// ReadPolicies reads what WritePolicies wrote into v; false: nothing was.
func (s Store) ReadPolicies(v any) (bool, error) {
	err := readJSON(filepath.Join(s.dir, policiesFile), v)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// WritePolicies keeps the policies that people gave on the command line.
func (s Store) WritePolicies(v any) error { return s.write(filepath.Join(s.dir, policiesFile), v) }

// DeletePolicies says that there are none.
func (s Store) DeletePolicies() error { return remove(filepath.Join(s.dir, policiesFile)) }

// ReadNames reads what WriteNames wrote into v; false: nothing was.
func (s Store) ReadNames(v any) (bool, error) {
	err := readJSON(filepath.Join(s.dir, namesFile), v)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// WriteNames keeps the names of what an agent has put into the tables of policy,
// which are the agent's from then on.
func (s Store) WriteNames(v any) error { return s.write(filepath.Join(s.dir, namesFile), v) }

// HasNames says whether the tables of policy are an agent's, running or not.
func (s Store) HasNames() bool {
	_, err := os.Stat(filepath.Join(s.dir, namesFile))
	return err == nil
}

// Make makes the store's directory, where there is none. One that somebody has made
// for it, as the kubelet does, is root's alone, too, whoever of mustang's has written
// there first: who can open a directory can lock it, and hold up for good who asks for
// that lock.
func (s Store) Make() error {
	if err := mkdir(s.dir); err != nil {
		return err
	}
	if err := s.checkOwner(); err != nil {
		return err
	}
	info, err := os.Stat(s.dir)
	if err != nil || info.Mode().Perm()&0o077 == 0 || info.Mode()&fs.ModeSticky != 0 {
		return err
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil || slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return !isOurs(e.Name()) }) {
		return err // a user's
	}
	return os.Chmod(s.dir, 0o700)
}

// checkOwner refuses a directory that another user has made where all may: what he puts there would be carried out.
func (s Store) checkOwner() error {
	info, err := os.Stat(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at the state directory: %w", err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("the state directory %s belongs to user %d, who could put there what is then carried out; remove it, or choose another with --state-dir", s.dir, st.Uid)
	}
	return nil
}

// others are what other rooms keep in the directory: records of the plugin and of pods,
// the agent's sockets, and the namespace where fragments are put together.
var others = []string{"cni", "pods", "agent.sock", "agent.sock.new", "tool.sock", "tool.sock.new", "gather"}

// isOurs says that a name in the directory is mustang's.
func isOurs(name string) bool {
	return slices.Contains([]string{journalFile, policiesFile, endpointsDir, nodesFile, namesFile, servicesDir, scopeFile}, name) ||
		strings.HasPrefix(name, tempPrefix) || slices.Contains(others, name)
}

func mkdir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the state directory: %w; choose another with --state-dir", err)
	}
	return nil
}

// Empty says that the store has nothing but its ScopeFile.
func (s Store) Empty() bool {
	for _, dir := range []string{s.dir, filepath.Join(s.dir, endpointsDir), filepath.Join(s.dir, servicesDir)} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) || slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return !e.IsDir() && e.Name() != scopeFile }) {
			return false
		}
	}
	return true
}

// Remove deletes the store: its own files, and its directory when nothing else
// is in it. The ScopeFile goes last: from then on another tool may begin.
func (s Store) Remove() error {
	err := errors.Join(os.RemoveAll(filepath.Join(s.dir, endpointsDir)), os.RemoveAll(filepath.Join(s.dir, servicesDir)))
	entries, _ := os.ReadDir(s.dir)
	for _, e := range entries {
		if e.Name() == journalFile || e.Name() == nodesFile || e.Name() == policiesFile || e.Name() == namesFile || strings.HasPrefix(e.Name(), tempPrefix) {
			err = errors.Join(err, remove(filepath.Join(s.dir, e.Name())))
		}
	}
	err = errors.Join(err, remove(s.ScopeFile()))
	// Fails when a user keeps files of his own there, which is his business.
	os.Remove(s.dir)
	return err
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// readJSON reads a file into v. One that is no JSON is fs.ErrNotExist, and
// removed: only a crash of the machine leaves such.
func readJSON(path string, v any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !json.Valid(text) {
		return errors.Join(fs.ErrNotExist, os.Remove(path))
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%s is damaged: %w", path, err)
	}
	return nil
}

// write replaces path by the JSON of v: temporary file, rename.
func (s Store) write(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	if err := mkdir(dir); err != nil {
		return err
	}
	// Its writer holds the scope's lock, so a killed one's file is overwritten.
	f, err := os.OpenFile(filepath.Join(dir, tempPrefix+filepath.Base(path)), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}
