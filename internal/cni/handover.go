// SPDX-License-Identifier: Apache-2.0

package cni

// A whole call handed to the agent, which has everything open: the plugin's side.
// It is what most processes of the plugin do in all their life, so it takes no
// more of the library than it must.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/record"
	"github.com/mustang-net/mustang/internal/socket"
)

// handed is a call as it crosses the socket. With it come two descriptors, since
// the agent may see other files: the container's network namespace, and the
// runtime's /proc/sys/net.
type handed struct {
	Command     string          `json:"command"`
	ContainerID string          `json:"containerID"`
	NetNS       string          `json:"netns"`
	IfName      string          `json:"ifname"`
	Args        string          `json:"args"`
	Path        string          `json:"path"`
	Config      json.RawMessage `json:"config"`
	PID         int             `json:"pid"` // the plugin's own, and when it started
	Start       string          `json:"start"`
}

func (h handed) env() call {
	return call{h.Command, h.ContainerID, h.NetNS, h.IfName, h.Args, h.Path}
}

// handedBack is what came of it. Yours: the agent did nothing, and leaves the call
// to the plugin.
type handedBack struct {
	Yours    bool            `json:"yours,omitempty"`
	Result   json.RawMessage `json:"result,omitempty"`
	Warnings []string        `json:"warnings,omitempty"`
	Code     uint            `json:"code,omitempty"`
	Msg      string          `json:"msg,omitempty"`
	Details  string          `json:"details,omitempty"`
}

// handOver has the agent do the call, which may fail with e. With err nothing was
// done, and the call is the plugin's: errNoAgent or errYours.
func handOver(env call, stdin []byte) (e *types.Error, err error) {
	if env.command != "ADD" && env.command != "DEL" || env.netns == "" {
		return nil, errYours
	}
	var c struct {
		StateDir string `json:"stateDir"`
	}
	path, err := filepath.Abs(env.netns)
	if err != nil || json.Unmarshal(stdin, &c) != nil {
		return nil, errYours
	}
	if c.StateDir == "" {
		c.StateDir = engine.DefaultStateDir
	}
	fd, err := connect(SocketPath(c.StateDir))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, errNoAgent
	}
	if err != nil {
		return nil, errYours
	}
	me := record.ThisMaker()
	answer, err := exchange(fd, handed{env.command, env.containerID, path, env.ifname, env.args, env.path, stdin, me.PID, me.Start})
	if errors.Is(err, errYours) {
		return nil, err
	}
	if err != nil {
		cleanUp(env, stdin)
		return codedf(types.ErrTryAgainLater, "the agent does not answer: %v; try again", err), nil
	}
	for _, w := range answer.Warnings {
		toStderr(w)
	}
	if answer.Code != 0 {
		return types.NewError(answer.Code, answer.Msg, answer.Details), nil
	}
	if len(answer.Result) > 0 {
		if _, err := os.Stdout.Write(append(answer.Result, '\n')); err != nil {
			return codedf(types.ErrIOFailure, "write the result: %v", err), nil
		}
	}
	return nil, nil
}

// errYours says that the call is the plugin's own to do.
var errYours = errors.New("the agent leaves this to the plugin")

func connect(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		unix.Close(fd)
		return -1, err
	}
	// Its answer is waited for in Go's poller: then all threads sleep.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// exchange sends the call and reads what came of it. It closes the connection: the
// agent begins nothing for who is gone.
func exchange(fd int, h handed) (back handedBack, err error) {
	conn := os.NewFile(uintptr(fd), "the agent's socket")
	defer conn.Close()
	if err := socket.CheckPeerFD(fd); err != nil {
		return back, errYours // it is refused there, too, with this reason
	}
	space, err := unix.Open(h.NetNS, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0) // a pipe is no reason to wait
	if err != nil {
		return back, errYours
	}
	defer unix.Close(space)
	sysctls, err := unix.Open("/proc/sys/net", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return back, errYours
	}
	defer unix.Close(sysctls)
	text, err := json.Marshal(struct {
		Call     handed    `json:"call"`
		Deadline time.Time `json:"deadline"`
	}{h, time.Now().UTC().Add(patience - answerMargin)})
	if err != nil {
		return back, errYours
	}
	n, err := unix.SendmsgN(fd, text, unix.UnixRights(space, sysctls), nil, unix.MSG_NOSIGNAL)
	if err != nil {
		return back, fmt.Errorf("send: %w", err)
	}
	err = conn.SetDeadline(time.Now().Add(patience))
	if err == nil && n < len(text) {
		_, err = conn.Write(text[n:])
	}
	if err == nil {
		err = json.NewDecoder(conn).Decode(&back)
	}
	if err != nil {
		return back, fmt.Errorf("receive: %w", err)
	}
	if back.Yours {
		return back, errYours
	}
	return back, nil
}

// cleanUp removes what an agent that died, or hangs, left of the call's
// attachment. It wrote the record before it made anything, with the call's maker:
// of an ADD, another's record is of an attachment that was there before.
func cleanUp(env call, stdin []byte) {
	p, e := prepare(env, stdin, toStderr)
	if e != nil {
		return
	}
	p.ctx, p.by.maker = context.Background(), record.ThisMaker()
	r, found, err := p.store.find(p.attachment())
	if err == nil && (!found || env.command == "ADD" && r.Maker != p.by.maker) {
		return
	}
	if err := p.collect(p.attachment()); err != nil { // the record stays, for DEL
		p.warn("clean up what the agent left: %v", err)
	}
}
