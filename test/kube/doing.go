// SPDX-License-Identifier: Apache-2.0

// This file says of a program that was waited for in vain what it is doing.

package kube

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Doing is a sentence about a process of this one: ended, idle or at work, at what, and the
// last lines of its log.
func Doing(name string, pid int, log string) string {
	text, _ := os.ReadFile(log)
	end := "its log is empty"
	if text = bytes.TrimSpace(text); len(text) > 0 {
		end = "its log ends:\n" + string(tail(text, 1000))
	}
	return name + " " + doing(pid, time.Second) + "; " + end
}

// Ended says whether a process of this one has ended.
func Ended(pid int) bool {
	state := readProcess(pid).state
	return state == "" || state == "Z"
}

// ticks is the unit of /proc's times: the same on every architecture.
const ticks = 100

// process is what /proc says of one.
type process struct {
	name     string
	state    string
	cpu      float64 // seconds
	exit     syscall.WaitStatus
	children []process
}

// doing watches a process for a moment.
func doing(pid int, moment time.Duration) string {
	before := readProcess(pid)
	if before.state == "Z" { // nobody has asked for its status yet
		if before.exit.Signaled() {
			return fmt.Sprintf("has ended by signal %d", before.exit.Signal())
		}
		return fmt.Sprintf("has ended with status %d", before.exit.ExitStatus())
	}
	if before.state == "" {
		return "has ended"
	}
	time.Sleep(moment)
	now := readProcess(pid)
	verb := "is idle"
	if used := now.total() - before.total(); used > 0 {
		verb = fmt.Sprintf("is at work (%.0f %% of a CPU just now)", 100*used/moment.Seconds())
	}
	text := fmt.Sprintf("%s, %.0f s of CPU so far", verb, now.cpu)
	for _, c := range now.children {
		text += fmt.Sprintf(", and waits for %s, %.0f s of CPU", c.name, c.total())
	}
	return text
}

func (p process) total() float64 {
	sum := p.cpu
	for _, c := range p.children {
		sum += c.total()
	}
	return sum
}

// readProcess reads a process and its children; an ended one without a parent that waits
// has no state.
func readProcess(pid int) process {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	text, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return process{}
	}
	p := parseStat(string(text))
	lists, _ := filepath.Glob(filepath.Join(dir, "task/*/children"))
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for _, child := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(child); err == nil {
				p.children = append(p.children, readProcess(n))
			}
		}
	}
	return p
}

// parseStat reads proc_pid_stat(5); the name stands in parentheses and may have any
// character.
func parseStat(text string) (p process) {
	open, end := strings.Index(text, "("), strings.LastIndex(text, ")")
	if open < 0 || end < open {
		return p
	}
	f := strings.Fields(text[end+1:]) // from the third field on
	number := func(field int) float64 {
		if field-3 >= len(f) {
			return 0
		}
		v, _ := strconv.ParseFloat(f[field-3], 64)
		return v
	}
	if len(f) > 0 {
		p.state = f[0]
	}
	p.name, p.cpu, p.exit = text[open+1:end], (number(14)+number(15))/ticks, syscall.WaitStatus(number(52))
	return p
}
