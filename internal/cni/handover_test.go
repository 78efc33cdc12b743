// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestAgentNeedsNotSeeThePodsNamespace: the agent is in a container, and the
// runtime may keep namespaces where the agent sees none. It does the call by the
// descriptors that come with it.
func TestAgentNeedsNotSeeThePodsNamespace(t *testing.T) {
	w := newWorld(t)
	w.agent("serves")
	place := filepath.Join(w.dir, "only-the-runtime-sees-it")
	if err := os.WriteFile(place, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"ADD", "DEL", "DEL", "ADD", "DEL"} {
		inner := w.plugin(command, w.config(nil), podArgs...)
		cmd := exec.Command("unshare", append([]string{"--mount", "sh", "-c", `mount --bind "$1" "$CNI_NETNS" && shift && exec "$@"`, "sh",
			"/var/run/netns/" + w.container}, inner.Args...)...)
		cmd.Env, cmd.Stdin = append(inner.Env, "CNI_NETNS="+place), inner.Stdin
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
		there := strings.Contains(w.ip("-n", w.container, "-o", "link"), "eth0")
		if want := command == "ADD"; there != want {
			t.Fatalf("after %s, the interface is there: %t", command, there)
		}
	}
	w.nothingLeft()
}

// TestNothingIsBegunForAPluginThatIsGone: its runtime has had DEL already.
func TestNothingIsBegunForAPluginThatIsGone(t *testing.T) {
	w := newWorld(t)
	w.agent("slow")
	w.killed(nil, slowness/4)
	time.Sleep(2 * slowness) // there is nothing to wait for
	w.nothingLeft()
}

// TestAnADDOfWhatIsThereTakesNothingAway: also when the agent hangs, which would
// have refused it.
func TestAnADDOfWhatIsThereTakesNothingAway(t *testing.T) {
	w := newWorld(t)
	w.ok(w.call("ADD", nil, podArgs...))
	result, enough := w.said, w.patience
	w.patience = "1s"
	stop := w.agent("hangs")
	w.tryAgain(w.call("ADD", nil, podArgs...))
	stop()
	w.patience = enough
	if out := w.ip("-n", w.container, "-o", "link"); !strings.Contains(out, "eth0") || len(w.endpoints()) != 1 {
		t.Errorf("the pod has %s", out)
	}
	w.ok(w.call("CHECK", map[string]any{"prevResult": json.RawMessage(result)}, podArgs...))
	w.ok(w.call("DEL", nil))
	w.nothingLeft()
}

// TestAgentThatMayNotWriteSysctlsLeavesInterfacesToThePlugin is the way that all
// modes without a host end go.
func TestAgentThatMayNotWriteSysctlsLeavesInterfacesToThePlugin(t *testing.T) {
	w := newWorld(t)
	w.agent("barred")
	w.ok(w.call("ADD", nil, podArgs...))
	if eps := w.endpoints(); len(eps) != 1 || eps[0].Labels["app"] != "label-of-web" {
		t.Errorf("endpoints: %+v", eps)
	}
	w.ok(w.call("DEL", nil))
	w.nothingLeft()
}

// TestDELWithoutNamespaceAfterAKilledADD goes past the agent, and waits for what
// that does still.
func TestDELWithoutNamespaceAfterAKilledADD(t *testing.T) {
	w := newWorld(t)
	w.agent("serves")
	for i := range 8 {
		cmd := w.plugin("ADD", w.config(nil), podArgs...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i+1) * 4 * time.Millisecond)
		cmd.Process.Kill()
		cmd.Wait()
		del := w.plugin("DEL", w.config(nil))
		del.Env = append(del.Env, "CNI_NETNS=")
		if out, err := del.CombinedOutput(); err != nil {
			t.Fatalf("DEL: %v: %s", err, out)
		}
		w.nothingLeft()
	}
}

func TestADDsTakeTurns(t *testing.T) {
	w := newWorld(t)
	w.ok(w.call("ADD", nil)) // makes the directories
	w.ok(w.call("DEL", nil))
	var held []*os.File
	for i := range turns() {
		f, err := os.OpenFile(filepath.Join(w.state(), "cni", fmt.Sprintf("turn-%d", i)), os.O_CREATE|os.O_RDONLY, 0o600)
		if err == nil {
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		}
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, f)
	}
	cmd := w.plugin("ADD", w.config(nil))
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waits := func() bool {
		locks, _ := os.ReadFile("/proc/locks")
		for line := range strings.Lines(string(locks)) {
			if strings.Contains(line, "-> FLOCK") && strings.Contains(line, fmt.Sprintf(" %d ", cmd.Process.Pid)) {
				return true
			}
		}
		return false
	}
	for end := time.Now().Add(time.Minute); !waits(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("an ADD does not wait for its turn")
		}
	}
	for _, f := range held {
		f.Close()
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	w.ok(w.call("DEL", nil))
	w.nothingLeft()
}
