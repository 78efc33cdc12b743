// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/cpu"
)

// Iperf3Version returns the version of iperf3, or an error that names the
// package to install.
func Iperf3Version() (string, error) {
	out, err := exec.Command("iperf3", "--version").Output()
	if err != nil {
		return "", fmt.Errorf("streams need iperf3: install the package iperf3, or use --stream-by own: %w", err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	version, _, _ := strings.Cut(line, " (")
	return version, nil
}

// iperf3Report is the part of iperf3's JSON that is read.
type iperf3Report struct {
	Error string `json:"error"`
	End   struct {
		Sent struct {
			Retransmits int64 `json:"retransmits"`
		} `json:"sum_sent"`
		Received struct {
			Seconds float64 `json:"seconds"`
			Bytes   int64   `json:"bytes"`
			Rate    float64 `json:"bits_per_second"`
		} `json:"sum_received"`
		CC string `json:"sender_tcp_congestion"`
	} `json:"end"`
}

// iperf3Load is a stream by iperf3. Its whole seconds are the shortest it can do,
// so it has one turn, which is all of it.
type iperf3Load struct {
	l     Launcher
	t     Target
	flows int
	s     Sample
}

// Turn implements Load.
func (i *iperf3Load) Turn(ctx context.Context) (Turn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, i.l.Duration+time.Second+slack, errDeadline)
	defer cancel()
	if err := i.l.iperf3(ctx, i.t, i.flows, &i.s); err != nil {
		return Turn{}, err
	}
	if i.s.Bytes == 0 {
		return Turn{}, errors.New("nothing was transferred")
	}
	return Turn{Rate: i.s.Rate, Cost: (i.s.CPU + i.s.Softirqd) / float64(i.s.Bytes)}, nil
}

// Finish implements Load.
func (i *iperf3Load) Finish() (Sample, error) { return i.s, nil }

// Kill implements Load: nothing runs between turns.
func (i *iperf3Load) Kill() {}

// iperf3 measures one stream of so many flows. CPU time is that of both processes
// from start to end: iperf3 has no hook at the ends of its window.
func (l Launcher) iperf3(ctx context.Context, t Target, flows int, s *Sample) error {
	before, err := l.Group.Read()
	if err != nil {
		return err
	}
	seconds := strconv.Itoa(max(1, int(math.Round(l.Duration.Seconds()))))
	port := strconv.Itoa(int(t.Listen.Port()))
	clientPlace, serverPlace := l.places(t)
	server := serverPlace.ExecArgs(l.CC, "iperf3", "-s", "-1", "--forceflush",
		"-B", t.Listen.Addr().String(), "-p", port)
	args := []string{"iperf3", "-c", t.Dial.Addr().String(), "-p", strconv.Itoa(int(t.Dial.Port())),
		"-t", seconds, "-P", strconv.Itoa(flows), "-J", "--connect-timeout", strconv.FormatInt(socketDeadline.Milliseconds(), 10)}
	if l.CC != "" {
		args = append(args, "-C", l.CC)
	}
	client := clientPlace.ExecArgs(l.CC, args...)
	usage, out, err := l.pair(ctx, server, client, "Server listening")
	if err != nil {
		return err
	}
	var r iperf3Report
	if err := json.Unmarshal(out, &r); err != nil {
		return fmt.Errorf("read iperf3's report: %w", err)
	}
	if r.Error != "" {
		return errors.New("iperf3: " + r.Error)
	}
	after, err := l.Group.Read()
	if err != nil {
		return err
	}
	used := after.Sub(before)
	s.CPU, s.Softirqd = used.Load.Seconds(), used.Softirqd.Seconds()
	if l.Group.Kind == cpu.Getrusage {
		s.CPU = usage.Seconds()
	}
	s.Bytes, s.Seconds, s.Rate = r.End.Received.Bytes, r.End.Received.Seconds, r.End.Received.Rate
	s.Count, s.Retransmits, s.CC = 1, r.End.Sent.Retransmits, r.End.CC
	return nil
}
