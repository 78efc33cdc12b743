// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Whichever the machine's iptables is, kube-proxy finds the one of its kind.
func TestIptablesIsTheBackends(t *testing.T) {
	for kind, backend := range map[Kind]string{Iptables: "(nf_tables)", IptablesLegacy: "(legacy)"} {
		if _, err := exec.LookPath(kind.tool(true, "save")); err != nil {
			t.Skip(err)
		}
		env, err := iptables(kind, t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		for _, tool := range []string{"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"} {
			cmd := exec.Command("sh", "-c", tool+" --version")
			cmd.Env = append(os.Environ(), env...)
			if out, err := cmd.CombinedOutput(); err != nil || !strings.HasPrefix(string(out), tool+" v") || !strings.Contains(string(out), backend) {
				t.Errorf("%s: %s is %s (%v), want %s", kind, tool, out, err, backend)
			}
		}
		if got := kind.Backend(); !strings.HasPrefix(got, "kube-proxy v") || !strings.HasSuffix(got, backend) {
			t.Errorf("%s by %q", kind, got)
		}
	}
}
