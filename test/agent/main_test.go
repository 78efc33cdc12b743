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

// The binaries under test.
var tool, plugin string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "mustang-agent-test-")
	if err == nil {
		tool, err = buildBinary(dir, "mustang", "MUSTANG_BIN")
	}
	if err == nil {
		plugin, err = buildBinary(dir, "mustang-cni", "MUSTANG_CNI_BIN")
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

func buildBinary(dir, name, variable string) (string, error) {
	if bin := os.Getenv(variable); bin != "" {
		return bin, nil
	}
	bin := filepath.Join(dir, name)
	build := exec.Command("go", "build", "-o", bin, "../../cmd/"+name)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", name, err, out)
	}
	return bin, nil
}
