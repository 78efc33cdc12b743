// SPDX-License-Identifier: Apache-2.0

// Package agent_test runs the agent against a real etcd and API server, and
// sends real packets between pods in network namespaces.
package agent_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

var tool string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "mustang-agent-test-")
	if err == nil {
		tool, err = buildBinary(dir)
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

func buildBinary(dir string) (string, error) {
	if bin := os.Getenv("MUSTANG_BIN"); bin != "" {
		return bin, nil
	}
	bin := filepath.Join(dir, "mustang")
	build := exec.Command("go", "build", "-o", bin, "../../cmd/mustang")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the tool: %w: %s", err, out)
	}
	return bin, nil
}
