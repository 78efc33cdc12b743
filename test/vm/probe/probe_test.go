// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"
)

// floor is what the datapath takes for granted on every kernel it runs on.
var floor = map[string]bool{
	"kernel BTF":                   true,
	"clsact cls_bpf":               true,
	"cgroup sock_addr by bpf_link": true,
	"bpf_redirect_peer":            true,
	"bpf_redirect_neigh":           true,
	"LRU hash":                     true,
	"batch lookup of an LRU hash":  true,
	"ring buffer":                  true,
}

func TestKernelHasTheFloor(t *testing.T) {
	if os.Getenv("MUSTANG_VM") == "" {
		t.Skip("probes a guest's kernel: run it by test/vm/go-test")
	}
	for _, f := range table {
		if !floor[f.name] {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			if err := inNetns(f.probe); err != nil {
				t.Error(err)
			}
		})
	}
}
