// SPDX-License-Identifier: Apache-2.0

package cni_test

import (
	"bufio"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Killed at any instant of ADD or DEL, the next DEL or GC leaves nothing.
func TestCrash_KilledAtAnyInstantThenDELOrGCLeavesNothing(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		conf := n.config(mode).with("masquerade", true)
		whole := n.timeOfADD(conf)
		rounds := 24
		if testing.Short() {
			rounds = 6
		}
		done := 0
		for i := range rounds {
			c := n.container()
			n.unchangedRound(i, func() {
				if i%3 == 2 {
					c.add(conf)
				}
				if c.kill(map[bool]string{true: "DEL", false: "ADD"}[i%3 == 2], conf, rand.N(whole)) {
					done++
				}
				if i%2 == 0 {
					c.del(conf)
				} else {
					n.ok(n.exec(n.command(binary, "GC", conf.with("cni.dev/valid-attachments", []any{}))))
				}
				run(t, "ip", "netns", "del", c.ns)
				n.device(mode) // a virtual one dies with the namespace it was killed in
				c.del(conf)
			})
			if t.Failed() {
				return
			}
		}
		t.Logf("%d of %d were killed before they ended", rounds-done, rounds)
	})
}

// timeOfADD is how long an ADD takes on this machine.
func (n *node) timeOfADD(conf config) time.Duration {
	n.t.Helper()
	c := n.container()
	started := time.Now()
	c.add(conf)
	defer c.del(conf)
	return time.Since(started)
}

// kill runs a command and kills it after a while; true: it had ended.
func (c *container) kill(command string, conf config, after time.Duration) bool {
	c.t.Helper()
	cmd := c.command(binary, command, conf, c.env()...)
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-ended:
		return true
	case <-time.After(after):
	}
	cmd.Process.Kill() // nsenter has become the plugin
	<-ended
	return false
}

// After a kill, the same ADD can simply be done again.
func TestCrash_AKilledADDCanBeRepeated(t *testing.T) {
	eachMode(t, func(t *testing.T, n *node, mode string) {
		whole := n.timeOfADD(n.config(mode))
		for range 4 {
			c := n.container()
			c.kill("ADD", n.config(mode), rand.N(whole))
			if a := c.call("ADD", n.config(mode)); a.status != 0 && a.Code != 101 { // it may have been complete
				t.Errorf("got %s%s", a.stdout, a.stderr)
			}
			c.del(n.config(mode))
		}
	})
}

// A run of these tests that is killed leaves namespaces, mounts and processes;
// the next one removes them, and nothing of runs that live.
func TestCrash_AKilledTestRunIsCleanedUpByTheNext(t *testing.T) {
	if os.Getenv(victimVariable) != "" {
		t.Skip("this is the run that is killed")
	}
	living := newNode(t)
	cmd := exec.Command(os.Args[0], "-test.run", "^TestVictim$")
	cmd.Env = append(os.Environ(), victimVariable+"=1", "MUSTANG_CNI_BIN="+binary)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "victim ") {
		t.Fatalf("%q %v", line, err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	name := strings.TrimSpace(strings.TrimPrefix(line, "victim "))
	traces := func() []string {
		left, _ := filepath.Glob("/var/run/netns/" + name + "*")
		mounts, _ := os.ReadFile("/proc/self/mounts")
		if strings.Contains(string(mounts), name+" ") {
			left = append(left, "its mount")
		}
		return left
	}
	if len(traces()) < 4 {
		t.Fatalf("the killed run left only %v", traces())
	}
	removeLeft()
	if left := traces(); len(left) > 0 {
		t.Errorf("still there: %v", left)
	}
	if !strings.Contains(run(t, "ip", "netns"), living.name) {
		t.Error("a living run's namespace is gone")
	}
}

const victimVariable = "MUSTANG_TEST_VICTIM"

// TestVictim is killed by the test above.
func TestVictim(t *testing.T) {
	if os.Getenv(victimVariable) == "" {
		t.Skip("only as the victim of another test")
	}
	n := newNode(t)
	c := n.container()
	c.add(n.config("veth").with("masquerade", true))
	c.server(":80")
	fmt.Println("victim", n.name)
	select {}
}

// unchangedRound is unchanged for the i-th round of a loop: namespaces come
// and go with the rounds.
func (n *node) unchangedRound(i int, fn func()) {
	n.t.Helper()
	look := func() map[string]string {
		out := n.traces()
		maps.DeleteFunc(out, func(k, _ string) bool {
			return strings.HasPrefix(k, "netns ") || strings.Contains(k, "/run/netns/") || strings.Contains(k, "dev0")
		})
		return out
	}
	before := look()
	fn()
	if d := cmp.Diff(before, look()); d != "" {
		n.t.Errorf("round %d: left behind (+) or missing (-):\n%s", i, d)
	}
}
