// SPDX-License-Identifier: Apache-2.0

// Command mustang-cni is the CNI plugin: container runtimes call it.
package main

import (
	"os"

	"github.com/mustang-net/mustang/internal/cni"
)

func main() { os.Exit(cni.Main()) }
