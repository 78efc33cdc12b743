// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mustang-net/mustang/lab"
)

// What the environment changes. Whatever makes the run smaller or slower than
// the whole table is printed at its start.
const (
	modesVariable       = "MUSTANG_TEST_MODES"
	pathsVariable       = "MUSTANG_TEST_PATHS"
	slownessVariable    = "MUSTANG_TEST_SLOWNESS"    // how many times slower than a machine this one is
	connectionsVariable = "MUSTANG_TEST_CONNECTIONS" // that are held open at once
	wholeConnections    = 10_000
)

var (
	slowness    = 1
	connections = wholeConnections
	patience    = 30 * time.Second // for anything that takes microseconds on a machine that has any
)

// slow is a time that an emulated machine gets more of.
func slow(d time.Duration) time.Duration { return d * time.Duration(slowness) }

func readEnvironment() error {
	for name, to := range map[string]*int{slownessVariable: &slowness, connectionsVariable: &connections} {
		text := os.Getenv(name)
		if text == "" {
			continue
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return fmt.Errorf("%s=%q is not a positive number", name, text)
		}
		*to = n
	}
	patience = slow(patience)
	if slowness > 1 {
		fmt.Printf("all deadlines are %d times longer (%s)\n", slowness, slownessVariable)
	}
	if connections != wholeConnections {
		fmt.Printf("%d connections are held open at once instead of %d (%s)\n", connections, wholeConnections, connectionsVariable)
	}
	for _, name := range []string{modesVariable, pathsVariable} {
		if text := os.Getenv(name); text != "" {
			fmt.Printf("only %s of the table (%s)\n", text, name)
		}
	}
	return nil
}

func chosen[T ~string](variable string, all ...T) []T {
	list := os.Getenv(variable)
	if list == "" {
		return all
	}
	var out []T
	for _, s := range strings.Split(list, ",") {
		out = append(out, T(s))
	}
	return out
}

func modes() []lab.Mode { return chosen(modesVariable, lab.Modes...) }

// onlyWith leaves out a test of one mode when others are asked for.
func onlyWith(t *testing.T, mode lab.Mode) {
	if !slices.Contains(modes(), mode) {
		t.Skipf("%s does not name %s", modesVariable, mode)
	}
}

// skippable: nobody asked for this mode by name, and the kernel lacks it.
func skippable(err error) bool {
	return os.Getenv(modesVariable) == "" && errors.Is(err, errors.ErrUnsupported)
}
