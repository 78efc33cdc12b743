// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

type thing struct{ A int }

func TestWhatACrashOfTheMachineLeavesIsAbsent(t *testing.T) {
	d := Dir[thing]{t.TempDir()}
	if err := d.Write("whole", thing{1}); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"empty": "", "zeros": "\x00\x00", "half": `{"A":`} {
		if err := os.WriteFile(d.file(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Read(name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	all, err := d.List()
	if err != nil || len(all) != 1 || all[0].A != 1 {
		t.Errorf("list: %v, %v", all, err)
	}
}

// Who can open a directory can lock it, and hold up for good who asks for that lock.
func TestOnlyItsOwnerCanLockADirectory(t *testing.T) {
	d := Dir[thing]{filepath.Join(t.TempDir(), "records")}
	for _, earlier := range []bool{false, true} {
		if earlier {
			if err := os.Chmod(d.Path, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.Locked(func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(d.Path); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("made by an earlier version: %t: %v, %v", earlier, info.Mode(), err)
		}
	}
}
