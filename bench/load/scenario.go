// SPDX-License-Identifier: Apache-2.0

package load

// Names of loads: what the launcher, the files and the reports call them.

import (
	"fmt"
	"strconv"
	"strings"
)

// Scenario is a kind of load: a mode, the size of its messages, how many
// connections at once.
type Scenario struct {
	Mode  Mode
	Size  int // bytes of a message; 0: the mode's own (1, of a stream 128 KiB)
	Flows int // connections at once, each with a thread at either end; 0 or 1: one
}

// MaxSize and MaxFlows bound a scenario.
const (
	MaxSize  = 1 << 20
	MaxFlows = 256
)

// String is the scenario's name: rr, rr:1440, rr*32.
func (s Scenario) String() string {
	name := string(s.Mode)
	if s.Size > 0 {
		name += ":" + strconv.Itoa(s.Size)
	}
	if s.Flows > 1 {
		name += "*" + strconv.Itoa(s.Flows)
	}
	return name
}

// ParseScenario reads a name as String writes it.
func ParseScenario(name string) (Scenario, error) {
	rest, flows, many := strings.Cut(name, "*")
	mode, size, sized := strings.Cut(rest, ":")
	s := Scenario{Mode: Mode(mode)}
	for _, part := range []struct {
		there bool
		text  string
		to    *int
	}{{sized, size, &s.Size}, {many, flows, &s.Flows}} {
		if !part.there {
			continue
		}
		n, err := strconv.Atoi(part.text)
		if err != nil || n < 1 {
			return s, fmt.Errorf("scenario %q: want a mode, as rr, with a size, as rr:1440, or a number of connections, as rr*32", name)
		}
		*part.to = n
	}
	return s, s.validate()
}

func (s Scenario) validate() error {
	sized, many := false, false
	switch s.Mode {
	case Stream, RR:
		sized, many = true, true
	case CRR:
		many = true
	case UDPRR, Tail:
	default:
		return fmt.Errorf("mode %q is unknown", s.Mode)
	}
	switch {
	case s.Size != 0 && !sized, s.Flows > 1 && !many:
		return fmt.Errorf("scenario %s: %s has neither other sizes nor more connections than that", s, s.Mode)
	case s.Size < 0 || s.Size > MaxSize:
		return fmt.Errorf("scenario %s: use a size of 1 to %d bytes", s, MaxSize)
	case s.Flows < 0 || s.Flows > MaxFlows:
		return fmt.Errorf("scenario %s: use 1 to %d connections", s, MaxFlows)
	}
	return nil
}
