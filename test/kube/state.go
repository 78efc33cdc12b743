// SPDX-License-Identifier: Apache-2.0

// This file is what is known of a cluster on disk: its directory, its lock,
// its record. All that `down` needs is written before it is made.

package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// record is a cluster's state on disk.
type record struct {
	Config  Config
	Ready   bool     // Up has returned; false: it is at work, or was killed
	Cgroups []string // directories to remove, parents first
	Port    int      // of 127.0.0.1, where the API server is reached from this machine
}

type cluster struct {
	record
	dir string
}

func open(name string) *cluster {
	return &cluster{record: record{Config: Config{Name: name}}, dir: filepath.Join(runRoot(), name)}
}

func (c *cluster) path(parts ...string) string {
	return filepath.Join(append([]string{c.dir}, parts...)...)
}

// kubeconfig is the path of the administrator's kubeconfig for programs on this machine.
func (c *cluster) kubeconfig() string { return c.path("kubeconfig") }

func (c *cluster) logFile(name string) string { return c.path("log", name+".log") }

// netns is the name of a machine's network namespace.
func (c *cluster) netns(machine string) string { return "kube-" + c.Config.Name + "-" + machine }

func (c *cluster) save() error {
	b, err := json.MarshalIndent(c.record, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(c.path("cluster.json"), string(b), 0o644)
}

// load reads the record; a cluster whose record is absent gives fs.ErrNotExist.
func (c *cluster) load() error {
	b, err := os.ReadFile(c.path("cluster.json"))
	if err != nil {
		return err
	}
	return json.Unmarshal(b, &c.record)
}

// Clusters names the clusters of this machine, those that a killed `up` left
// included.
func Clusters() ([]string, error) {
	entries, err := os.ReadDir(runRoot())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// running loads the cluster and says in a sentence why it cannot be used.
func running(name string) (*cluster, error) {
	c := open(name)
	if err := c.load(); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("no cluster %q runs here; to start one: kube up --name %s", name, name)
	} else if err != nil {
		return nil, err
	}
	return c, nil
}

// lock keeps other calls that change the cluster out until unlock. It waits
// for ten seconds, so that `down` right after a killed `up` works.
func (c *cluster) lock() (unlock func(), err error) {
	path := c.dir + ".lock"
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if err := os.MkdirAll(runRoot(), 0o755); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o644)
		if errors.Is(err, fs.ErrNotExist) {
			continue // whoever removed the last cluster has removed the directory since
		}
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && sameFile(f, path) {
			return func() { c.unlock(f, path) }, nil
		}
		f.Close()
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("cluster %q: another kube command is at work on it", c.Config.Name)
		}
	}
}

// unlock removes the lock file with the last cluster's directory. The file
// goes while the lock is held: whoever opened it before sees another one, or
// none, at its path and tries again.
func (c *cluster) unlock(f *os.File, path string) {
	if !isDir(c.dir) {
		os.Remove(path)
	}
	f.Close()
	os.Remove(runRoot()) // succeeds when it is empty
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}

// recordPid writes down a machine's first process with its start time, since
// the number alone may belong to somebody else by the time it is read.
func (c *cluster) recordPid(machine string, pid int) error {
	start, err := startTime(pid)
	if err != nil {
		return err
	}
	return writeFile(c.path("pids", machine), fmt.Sprintf("%d %d\n", pid, start), 0o644)
}

// pid returns a machine's first process, or 0 when it is gone.
func (c *cluster) pid(machine string) int {
	b, err := os.ReadFile(c.path("pids", machine))
	if err != nil {
		return 0
	}
	var pid int
	var start uint64
	if _, err := fmt.Sscan(string(b), &pid, &start); err != nil {
		return 0
	}
	if now, err := startTime(pid); err != nil || now != start {
		return 0
	}
	return pid
}

// startTime is field 22 of /proc/PID/stat, in clock ticks since boot. A dead
// process that nobody has waited for is gone.
func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field is a name in parentheses that may hold anything.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return 0, fs.ErrNotExist
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// child is the process that runs inside the machine's namespaces, its process 1. It is listed with the
// thread that started it, which need not be the first. A list may leave a child out while others end
// (proc(5)): so it is read again.
func child(pid int) (int, error) {
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		if err != nil {
			return 0, err
		}
		for _, list := range lists {
			b, _ := os.ReadFile(list) // a thread may have ended
			if fields := strings.Fields(string(b)); len(fields) > 0 {
				return strconv.Atoi(fields[0])
			}
		}
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("process %d has no child", pid)
		}
	}
}

func writeFile(path, content string, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, []byte(content), mode); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
