// SPDX-License-Identifier: Apache-2.0

// Package run measures contestants beside each other. A contestant is a plug-in: it
// knows how to bring up pods and Services and says which paths there are to a server.
// What is measured over them, in which order, and what is kept of it, is here, the same
// for all.
package run

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/bench/runner"
)

// Contestant is something to measure.
type Contestant interface {
	Name() string
	// Up builds the environment, which then stays until Close: samples of all
	// contestants interleave. cgroup is the environment's v2 control group, ""
	// for none; all its loads run there. What this machine cannot have is an
	// errors.ErrUnsupported.
	Up(ctx context.Context, cgroup string) (Env, error)
}

// Env is a contestant's environment while it is up.
type Env interface {
	Paths() []Path
	// ProgramSet is what `mustang status -o json` says, nil elsewhere.
	ProgramSet() json.RawMessage
	Close() error
}

// Path is one way to the server.
type Path struct {
	Subject report.Subject
	Target  runner.Target
	Only    []string // scenarios; nil for all
}

// Optional is a contestant that the run does without where the machine lacks what it
// takes: then it is named, and is no failure.
type Optional struct{ Contestant }

// Fact is something that happens or does not, found out once beside how fast.
type Fact struct {
	Name string // in report.Document.Facts
	// Find is given a launcher of short loads and a control group of its own.
	Find func(ctx context.Context, l runner.Launcher, cgroup string) (bool, error)
}

// lacking says whether a contestant's failure is this machine's.
func lacking(c Contestant, err error) bool {
	_, optional := c.(Optional)
	return optional && errors.Is(err, errors.ErrUnsupported)
}
