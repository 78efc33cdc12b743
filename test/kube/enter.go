// SPDX-License-Identifier: Apache-2.0

// This file runs commands in a cluster: inside a machine, and kubectl.

package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// entry is a command that runs inside a machine.
type entry struct {
	cgroups []string
	args    []string
	env     []string
}

func (c *cluster) entry(machine string, command []string) (*entry, error) {
	if len(c.cgroupsOf(machine)) == 0 {
		return nil, fmt.Errorf("cluster %q has no machine %q; it has %s", c.Config.Name, machine, strings.Join(c.Config.machines(), ", "))
	}
	pid := c.pid(machine)
	if pid == 0 {
		return nil, fmt.Errorf("machine %s of cluster %q has ended; its log is %s", machine, c.Config.Name, c.logFile(machine+".init"))
	}
	inner, err := child(pid)
	if err != nil {
		return nil, err
	}
	b, err := newBuilder(context.Background(), 1, io.Discard)
	if err != nil {
		return nil, err
	}
	args := []string{
		"nsenter", fmt.Sprintf("--target=%d", inner), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--",
	}
	env := c.environment(b)
	if value, ok := os.LookupEnv("TERM"); ok {
		env = append(env, "TERM="+value)
	}
	return &entry{cgroups: c.cgroupsOf(machine), args: append(args, command...), env: env}, nil
}

// Enter becomes a command inside a machine, in all its namespaces and its
// control groups: what an agent on that node would be. It returns only on an error.
func Enter(name, machine string, command []string) error {
	c, err := running(name)
	if err != nil {
		return err
	}
	e, err := c.entry(machine, command)
	if err != nil {
		return err
	}
	nsenter, err := exec.LookPath(e.args[0])
	if err != nil {
		return err
	}
	if err := join(e.cgroups); err != nil {
		return err
	}
	return unix.Exec(nsenter, e.args, e.env)
}

// Kubectl becomes kubectl with the cluster's kubeconfig.
func Kubectl(name string, args []string) error {
	c, err := running(name)
	if err != nil {
		return err
	}
	b, err := newBuilder(context.Background(), 1, io.Discard)
	if err != nil {
		return err
	}
	env := append(os.Environ(), "KUBECONFIG="+c.kubeconfig())
	return unix.Exec(b.path("hyperkube", "kubectl"), append([]string{"kubectl"}, args...), env)
}

// LoadImage gives every node the images of an archive, as `docker save` writes it.
func LoadImage(ctx context.Context, name, archive string, out io.Writer) error {
	c, err := running(name)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for _, node := range c.Config.nodes() {
		f, err := os.Open(archive)
		if err != nil {
			return err
		}
		// A process of its own, because it joins the node's control groups.
		cmd := exec.CommandContext(ctx, self, append([]string{"enter", "--name", name, node, "--"}, importCommand("-")...)...)
		var said bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = f, &said, &said
		if err := errors.Join(cmd.Run(), f.Close()); err != nil {
			return fmt.Errorf("import %s into %s: %w\n%s", archive, node, err, said.Bytes())
		}
		_, _ = out.Write(said.Bytes())
	}
	return nil
}

// Status prints what runs: one cluster in detail, or all.
func Status(out io.Writer) error {
	names, err := Clusters()
	if err != nil {
		return err
	}
	if len(names) == 0 {
		fmt.Fprintln(out, "no cluster runs")
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CLUSTER\tMACHINE\tSTATE\tPROCESSES\tCGROUP2\tCNI\tPROXY")
	for _, name := range names {
		c, err := running(name)
		if err != nil {
			fmt.Fprintf(w, "%s\t-\tleft by a killed up\t-\t-\t-\t-\n", name)
			continue
		}
		for _, machine := range c.Config.machines() {
			state := "ended"
			if c.pid(machine) != 0 {
				state = map[bool]string{true: "runs", false: "starts"}[c.Ready]
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\t%s\n", name, machine, state, len(c.members(machine)),
				c.cgroup2(machine), c.Config.CNI, c.Config.Proxy)
		}
		defer func() {
			fmt.Fprintf(out, "\ncluster %s: kubeconfig %s, logs %s\n", name, c.kubeconfig(), c.path("log"))
			for _, line := range c.deaths() {
				fmt.Fprintln(out, "  ", line)
			}
		}()
	}
	return w.Flush()
}

// Kubeconfig is the path of a cluster's kubeconfig for programs on this machine.
func Kubeconfig(name string) string { return open(name).kubeconfig() }

// Cgroup2 is a machine's own root of the cgroup2 hierarchy, as this machine
// sees it. Inside the machine it is /sys/fs/cgroup/unified.
func Cgroup2(name, machine string) (string, error) {
	c, err := running(name)
	if err != nil {
		return "", err
	}
	dir := c.cgroup2(machine)
	if dir == "" {
		return "", fmt.Errorf("cluster %q has no machine %q", name, machine)
	}
	return dir, nil
}
