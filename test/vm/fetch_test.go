// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The mirror is the one that apt calls Debian's: an address, or, as in a cloud's image, a file of them.
func TestTheMirrorIsDebiansByApt(t *testing.T) {
	for _, mirror := range []string{"http://debian.example/debian", "mirror+file:/etc/apt/mirrors/debian.list"} {
		bin := t.TempDir()
		apt := "#!/bin/sh\ncase \"$*\" in\nindextargets*'Origin: Debian Label: Debian') printf '%s/\\n' '" + mirror + "' '" + mirror + "' ;;\n*) exit 1 ;;\nesac\n"
		if err := os.WriteFile(filepath.Join(bin, "apt-get"), []byte(apt), 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("bash", "-euo", "pipefail", "-c", `eval "$(sed -n '/^mirror()/,/^}/p' fetch)"; mirror`)
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "MUSTANG_VM_MIRROR=")
		if out, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != mirror {
			t.Errorf("%q, %v, want %s", out, err, mirror)
		}
	}
}
