// SPDX-License-Identifier: Apache-2.0

package cni_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
)

// dumpTable is a pinned table as text, without the zeroes of arrays.
func dumpTable(pin string) string {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if err != nil {
		return err.Error()
	}
	defer m.Close()
	var lines []string
	key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
	it := m.Iterate()
	for it.Next(&key, &value) {
		if m.Type() != ebpf.Array || len(bytes.Trim(value, "\x00")) > 0 {
			lines = append(lines, fmt.Sprintf("%x=%x", key, value))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
