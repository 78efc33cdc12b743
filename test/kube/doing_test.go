// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestStatOfAProcessIsRead(t *testing.T) {
	p := parseStat("77 (a) b (c) R 1 77 77 0 -1 4194560 100 0 0 0 250 50 9 9 20 0 1 0 12 0 0 " + strings.Repeat("0 ", 27) + "768\n")
	if p.name != "a) b (c" || p.state != "R" || p.cpu != 3 || p.exit.ExitStatus() != 3 {
		t.Errorf("%+v", p)
	}
	if p := parseStat("77 (cut"); p.state != "" {
		t.Errorf("of half a line: %+v", p)
	}
}

func TestWhatAProcessIsDoing(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	start := func(script string) int {
		t.Helper()
		cmd := exec.Command("sh", "-c", script)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		return cmd.Process.Pid
	}
	say := func(pid int, want ...string) {
		t.Helper()
		var got string
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
			got = Doing("it", pid, log)
			missing := ""
			for _, w := range want {
				if !strings.Contains(got, w) {
					missing = w
				}
			}
			if missing == "" {
				return
			}
		}
		t.Errorf("%q, want all of %q", got, want)
	}
	say(start("exit 3"), "it has ended with status 3", "its log is empty")
	if err := os.WriteFile(log, []byte("last words\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	say(start("kill -9 $$"), "it has ended by signal 9", "its log ends:\nlast words")
	say(start("while :; do :; done"), "it is at work (")
	say(start("sleep 5 & wait"), "it is idle", "and waits for sleep")
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	say(gone.Process.Pid, "it has ended;")
	if !Ended(gone.Process.Pid) || Ended(os.Getpid()) {
		t.Error("who has ended is not known")
	}
}
