// SPDX-License-Identifier: Apache-2.0

// This file is the inside of a machine. Two processes of this same program
// make it: the first joins the machine's groups and network namespace, the
// second, its child, is process 1 of the machine's other namespaces. When the
// first is killed, so is the second, and with it everything in the machine.

package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// spec is all that a machine needs to know of itself.
type spec struct {
	Name    string
	NetNS   string // path
	Cgroups []string
	Root    rootSpec
	Sysctls map[string]string // below /proc/sys
	Env     []string
	Steps   []step
	// Forward, when given, is where connections go that come in on the
	// inherited socket: from the network namespace around us to this one.
	Forward string
}

// step is a program that a machine starts, in order.
type step struct {
	Name   string
	Args   []string
	Wait   string // a path that must exist first
	Daemon bool   // starts again when it ends; else the next step waits for its success
}

const (
	outerArg   = "kube-machine"
	innerArg   = "kube-machine-init"
	listenerFD = 3
	// machineLogs is where a machine sees the cluster's log directory.
	machineLogs = "/var/log/kube"
	// deaths lists daemons that ended.
	deaths = "deaths.log"
)

// RunMachine must be the first call of a program that calls Up: it returns
// unless the program was started to be a machine.
func RunMachine() {
	if len(os.Args) != 3 {
		return
	}
	var run func(spec) error
	switch os.Args[1] {
	case outerArg:
		run = runOuter
	case innerArg:
		run = runInner
	default:
		return
	}
	var s spec
	text, err := os.ReadFile(os.Args[2])
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err == nil {
		err = run(s)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "machine %s: %v\n", s.Name, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// start starts a machine. Nothing happens in it before its process is written
// down: the process waits for a word, and ends when we end before we say it.
func (c *cluster) start(s spec, listener *os.File) error {
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	file := c.path(s.Name, "spec.json")
	if err := writeFile(file, string(text), 0o644); err != nil {
		return err
	}
	log, err := os.Create(c.logFile(s.Name + ".init"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe", outerArg, file)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if listener != nil {
		cmd.ExtraFiles = []*os.File{listener}
	}
	word, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }() // else it stays a zombie for as long as we live
	if err := c.recordPid(s.Name, cmd.Process.Pid); err != nil {
		_ = word.Close()
		return err
	}
	_, err = io.WriteString(word, "go")
	return errors.Join(err, word.Close())
}

func runOuter(s spec) error {
	runtime.LockOSThread() // the network namespace is the thread's, and so is Pdeathsig
	if err := join(s.Cgroups); err != nil {
		return err
	}
	if word, _ := io.ReadAll(os.Stdin); string(word) != "go" {
		return errors.New("not started: who started us has ended")
	}
	ns, err := os.Open(s.NetNS)
	if err != nil {
		return err
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter %s: %w", s.NetNS, err)
	}
	cmd := exec.Command("/proc/self/exe", innerArg, os.Args[2])
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if s.Forward != "" {
		cmd.ExtraFiles = []*os.File{os.NewFile(listenerFD, "listener")}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP,
		Pdeathsig:  unix.SIGKILL,
	}
	return cmd.Run()
}

func runInner(s spec) error {
	if err := unix.Sethostname([]byte(s.Name)); err != nil {
		return err
	}
	if err := s.Root.enter(); err != nil {
		return fmt.Errorf("make its root: %w", err)
	}
	for name, value := range s.Sysctls {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	if s.Forward != "" {
		listener, err := net.FileListener(os.NewFile(listenerFD, "listener"))
		if err != nil {
			return err
		}
		go forward(listener, s.Forward)
	}
	os.Clearenv()
	for _, kv := range s.Env {
		name, value, _ := strings.Cut(kv, "=")
		os.Setenv(name, value)
	}
	r := &reaper{waiting: map[int]chan syscall.WaitStatus{}}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD) // before anything can end
	go r.run(ended)
	for _, st := range s.Steps {
		waitFor(st.Wait)
		if st.Daemon {
			go r.keep(s.Name, st)
			continue
		}
		if status, err := r.execute(s.Name, st); err != nil || status.ExitStatus() != 0 {
			note(s.Name, st.Name, status, err)
			return fmt.Errorf("%s: status %d, %v", st.Name, status.ExitStatus(), err)
		}
	}
	select {}
}

func waitFor(path string) {
	for path != "" && !exists(path) {
		time.Sleep(20 * time.Millisecond)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// forward joins each accepted connection with one to address.
func forward(listener net.Listener, address string) {
	for {
		in, err := listener.Accept()
		if err != nil {
			fmt.Fprintln(os.Stderr, "forward:", err)
			return
		}
		go func() {
			defer in.Close()
			out, err := net.Dial("tcp", address)
			if err != nil {
				return
			}
			defer out.Close()
			go func() {
				_, _ = io.Copy(out, in)
				_ = out.(*net.TCPConn).CloseWrite()
			}()
			_, _ = io.Copy(in, out)
		}()
	}
}

// reaper waits for the processes that process 1 started, and for the orphans
// that the kernel gives to it.
type reaper struct {
	mu      sync.Mutex
	waiting map[int]chan syscall.WaitStatus
}

func (r *reaper) run(ended <-chan os.Signal) {
	for range ended {
		r.collect()
	}
}

func (r *reaper) collect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if c := r.waiting[pid]; c != nil {
			c <- status
			delete(r.waiting, pid)
		}
	}
}

// execute runs a step to its end, its output in the step's log.
func (r *reaper) execute(machine string, st step) (syscall.WaitStatus, error) {
	path := filepath.Join(machineLogs, machine+"."+st.Name+".log")
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	program, err := exec.LookPath(st.Args[0])
	if err != nil {
		return 0, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	done := make(chan syscall.WaitStatus, 1)
	r.mu.Lock()
	process, err := os.StartProcess(program, st.Args, &os.ProcAttr{
		Dir: "/", Env: os.Environ(), Files: []*os.File{null, log, log}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err == nil {
		r.waiting[process.Pid] = done
		_ = process.Release()
	}
	r.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return <-done, nil
}

// keep runs a daemon, and again a second after it ends, as a service manager would;
// while it is to be stopped, it waits.
func (r *reaper) keep(machine string, st step) {
	for {
		for exists(stopped(st.Name)) {
			time.Sleep(100 * time.Millisecond)
		}
		status, err := r.execute(machine, st)
		note(machine, st.Name, status, err)
		time.Sleep(time.Second)
	}
}

// note writes down that a daemon ended, where `up` and `status` look.
func note(machine, name string, status syscall.WaitStatus, err error) {
	how := fmt.Sprintf("status %d", status.ExitStatus())
	if status.Signaled() {
		how = status.Signal().String()
	}
	if err != nil {
		how = err.Error()
	}
	f, err := os.OpenFile(filepath.Join(machineLogs, deaths), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return
	}
	fmt.Fprintf(f, "%s %s.%s ended: %s\n", time.Now().Format(time.TimeOnly), machine, name, how)
	f.Close()
}
