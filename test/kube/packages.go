// SPDX-License-Identifier: Apache-2.0

// This file knows the Debian packages whose programs run in a cluster or are
// copied into its images.

package kube

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// packages maps a file that must exist to the package that has it.
var packages = map[string]string{
	"/usr/bin/containerd":              "containerd",
	"/usr/sbin/runc":                   "runc",
	"/usr/lib/cni/bridge":              "containernetworking-plugins",
	"/usr/sbin/iptables":               "iptables",
	"/usr/sbin/nft":                    "nftables",
	"/usr/sbin/conntrack":              "conntrack",
	"/usr/bin/nsenter":                 "util-linux",
	"/usr/sbin/modprobe":               "kmod",
	"/usr/bin/gcc":                     "gcc",
	"/usr/lib/x86_64-linux-gnu/libc.a": "libc6-dev",
	busybox:                            "busybox-static",
	"/bin/bash":                        "bash",
	"/usr/bin/curl":                    "curl",
	"/usr/bin/wget":                    "wget",
	"/bin/nc.openbsd":                  "netcat-openbsd",
	"/sbin/ip":                         "iproute2",
	"/usr/bin/dig":                     "bind9-dnsutils",
	"/usr/bin/iperf":                   "iperf",
	"/usr/bin/getent":                  "libc-bin",
}

func missingPackages() []string {
	var missing []string
	for file, name := range packages {
		if _, err := os.Stat(file); err != nil {
			missing = append(missing, name)
		}
	}
	slices.Sort(missing)
	return missing
}

func installPackages(ctx context.Context, out io.Writer) error {
	missing := missingPackages()
	if len(missing) == 0 {
		return nil
	}
	list := strings.Join(missing, " ")
	if _, err := exec.LookPath("apt-get"); err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("please install, or run this as root where there is apt-get: %s", list)
	}
	fmt.Fprintf(out, "installing %s\n", list)
	for _, args := range [][]string{{"update"}, append([]string{"install", "-y", "--no-install-recommends"}, missing...)} {
		// The machine may be installing something, too.
		cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-o", "Acquire::Retries=5", "-o", "DPkg::Lock::Timeout=300"}, args...)...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		var log bytes.Buffer
		cmd.Stdout, cmd.Stderr = &log, &log
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("apt-get %s (packages: %s): %w\n%s", args[0], list, err, tail(log.Bytes(), 2000))
		}
	}
	return nil
}
