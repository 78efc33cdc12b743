// SPDX-License-Identifier: Apache-2.0

package run

import (
	"context"

	"github.com/mustang-net/mustang/bench/report"
)

// Some is a contestant of which only some ways are measured, or only under some loads.
type Some struct {
	Contestant
	// Loads are the scenarios of a way: nil for all of the plan's, none to leave it out.
	Loads func(report.Subject) (scenarios []string, all bool)
}

type someEnv struct {
	Env
	paths []Path
}

func (e someEnv) Paths() []Path { return e.paths }

// Up implements Contestant.
func (s Some) Up(ctx context.Context, cgroup string) (Env, error) {
	env, err := s.Contestant.Up(ctx, cgroup)
	if err != nil {
		return env, err
	}
	out := someEnv{Env: env}
	for _, p := range env.Paths() {
		only, all := s.Loads(p.Subject)
		if !all {
			p.Only = only
		}
		if all || len(only) > 0 {
			out.paths = append(out.paths, p)
		}
	}
	return out, nil
}
