// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// refused are commands that end with a sentence and a status, and change nothing.
type refused []struct {
	args []string
	code int
	want string
}

func (list refused) check(t *testing.T, w *tool, stdin string) {
	t.Helper()
	for _, c := range list {
		if out, errs, code := w.run(stdin, c.args...); code != c.code || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 || !strings.HasPrefix(errs, "mustang: ") {
			t.Errorf("%v: status %d, %q%q; want %d, %q", c.args, code, out, errs, c.code, c.want)
		}
	}
	if _, err := os.Stat(w.bpffs); !os.IsNotExist(err) {
		t.Error("they left something")
	}
}

func TestOneFileIsGiven(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(file, []byte("[]"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, group := range []string{"svc apply", "policy apply", "policy rm", "node apply"} {
		refused{
			{append(strings.Fields(group), "-f", "/none/such", "-f", file), 2, "is given twice, /none/such and " + file},
			{append(strings.Fields(group), "-f", ""), 2, "is empty"},
		}.check(t, newTool(t), "")
	}
}

func TestFlagsThatCannotBeReadSayWhatIsExpected(t *testing.T) {
	add := []string{"svc", "add", "--service", "10.96.0.1:80"}
	refused{
		{append(add, "--backend", ""), 2, "--backend is empty"},
		{append(add, "--backend", "10.1.1.1:80", "--backend", ""), 2, "--backend is empty"},
		{append(add, "--lb-ip", "192.0.2.1", "--source-range", ""), 2, "--source-range is empty"},
		{append(add, "--node-port", "99999"), 2, `--node-port: "99999" is not a number from 0 to 65535`},
		{[]string{"edge", "set", "--host", "--addresses", ""}, 2, "--addresses is empty"},
		{[]string{"node", "add", "n2", "--address", "10.3.0.2", "--pod-cidr", ""}, 2, "--pod-cidr is empty"},
		{[]string{"observe", "--pod", ""}, 2, "--pod is empty"},
	}.check(t, newTool(t), "")
}
