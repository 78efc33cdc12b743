// SPDX-License-Identifier: Apache-2.0

// Package agent_test runs the agent against a real etcd and API server, and
// sends real packets between pods in network namespaces.
package agent_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/mustang-net/mustang/test/built"
)

// The binaries under test.
var tool, plugin string

func TestMain(m *testing.M) {
	if flag.Parse(); testing.Short() {
		os.Exit(m.Run()) // every test is skipped
	}
	dir, err := os.MkdirTemp("", "mustang-agent-test-")
	if err == nil {
		tool, err = built.Binary(dir, "mustang", "MUSTANG_BIN")
	}
	if err == nil {
		plugin, err = built.Binary(dir, "mustang-cni", "MUSTANG_CNI_BIN")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "agent tests:", err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	if code == 0 {
		// Threads that keep child processes alive are kept on purpose.
		if err := goleak.Find(goleak.IgnoreAnyFunction("github.com/mustang-net/mustang/test/kube.(*APIServer).inside.func1")); err != nil {
			fmt.Fprintln(os.Stderr, "agent tests:", err)
			code = 1
		}
	}
	os.Exit(code)
}
