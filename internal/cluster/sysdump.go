// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// dumpCommands are run in each agent.
var dumpCommands = []string{
	"status -o json", "status", "ep ls -o json", "svc ls -o json", "policy ls -o json", "node ls -o json", "edge show -o json", "agent health --config /etc/mustang/agent.yaml",
}

// dumpObjects are read from the API server. No Secret is among them, nor what withoutValues leaves out.
var dumpObjects = map[string]string{
	"nodes": "/api/v1/nodes", "pods": "/api/v1/pods", "services": "/api/v1/services", "namespaces": "/api/v1/namespaces", "events": "/api/v1/events",
	"endpointslices": "/apis/discovery.k8s.io/v1/endpointslices", "networkpolicies": "/apis/networking.k8s.io/v1/networkpolicies",
	"daemonsets": "/apis/apps/v1/daemonsets",
}

// configuration is the agents' in a namespace that has some: others' may be called so, too.
func configuration(namespace string) string {
	return "/api/v1/namespaces/" + namespace + "/configmaps/mustang"
}

// Sysdump writes what a report of a fault needs into a .tar.gz. What cannot be
// read is told in it, and how much that is. No file stays when that is everything,
// or when ctx ends.
func (c *Cluster) Sysdump(ctx context.Context, file string) (err error) {
	f, err := os.OpenFile(filepath.Clean(file), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(f)
	w := tar.NewWriter(zip)
	defer func() {
		if err = errors.Join(err, w.Close(), zip.Close(), f.Close()); err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", file, err), os.Remove(file))
		}
	}()
	now := time.Now()
	parts, problems := 0, []error(nil)
	err = c.parts(ctx, func(p part) error {
		parts++
		if p.problem != nil {
			problems = append(problems, fmt.Errorf("%s: %w", p.name, p.problem))
			p.text = append(p.text, []byte("\nERROR: "+p.problem.Error()+"\n")...)
		}
		err := w.WriteHeader(&tar.Header{Name: "mustang-sysdump/" + p.name, Mode: 0o600, Size: int64(len(p.text)), ModTime: now})
		if err == nil {
			_, err = w.Write(p.text)
		}
		return err
	})
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case len(problems) == parts:
		return fmt.Errorf("nothing could be read: %w", problems[0])
	case len(problems) > 0:
		c.note(fmt.Sprintf("%d of %d parts of the sysdump could not be read, or not whole; the first: %v", len(problems), parts, problems[0]))
	}
	return nil
}

// part is one file of a sysdump.
type part struct {
	name    string
	text    []byte
	problem error // what kept it from being read, or from being read whole
}

// atOnce is how many nodes are asked at the same time: one that hangs takes as long as all its
// answers may, and what they say is kept until it is written.
const atOnce = 8

// parts reads all that a sysdump has, and puts each part, nodes in their order. It asks no
// further when put fails, or ctx ends.
func (c *Cluster) parts(ctx context.Context, put func(part) error) error {
	read := func(name, path string) error {
		text, problem := c.api.Raw(ctx, path)
		if problem == nil {
			text, problem = withoutValues(text)
		}
		return put(part{"api/" + name + ".json", text, problem})
	}
	for _, name := range slices.Sorted(maps.Keys(dumpObjects)) {
		if err := read(name, dumpObjects[name]); err != nil {
			return err
		}
	}
	members, problem := c.members(ctx)
	if problem != nil {
		if err := put(part{"agents.txt", nil, problem}); err != nil {
			return err
		}
	}
	members = slices.DeleteFunc(members, func(m member) bool { return m.agent == nil })
	namespaces := map[string]bool{}
	for _, m := range members {
		namespaces[m.agent.Namespace] = true
	}
	for _, namespace := range slices.Sorted(maps.Keys(namespaces)) {
		if err := read("configuration/"+namespace, configuration(namespace)); err != nil {
			return err
		}
	}
	for some := range slices.Chunk(members, atOnce) {
		said := make([][]part, len(some))
		var wg sync.WaitGroup
		for i, m := range some {
			wg.Go(func() { said[i] = c.nodeParts(ctx, m) })
		}
		wg.Wait()
		for _, p := range slices.Concat(said...) {
			if err := put(p); err != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return nil
		}
	}
	return nil
}

// nodeParts are what a member's agent answers, and its logs.
func (c *Cluster) nodeParts(ctx context.Context, m member) (out []part) {
	dir := "nodes/" + m.node.Name + "/"
	for _, command := range dumpCommands {
		text, problem := c.run(ctx, m, strings.Fields(command)...)
		out = append(out, part{dir + strings.NewReplacer(" ", "-", "/", "-").Replace(command) + ".txt", text, problem})
	}
	text, problem := c.log(ctx, m, false)
	out = append(out, part{dir + "agent.log", text, problem})
	text, problem = c.log(ctx, m, true)
	if !apierrors.IsBadRequest(problem) { // else there was none before
		out = append(out, part{dir + "agent.previous.log", text, problem})
	}
	return out
}

// longest is how many bytes of an annotation are shown.
const longest = 256

// holdsObject says that an annotation may have the whole object once more, as kubectl apply and
// others keep it, packed or not.
func holdsObject(name string, value any) bool {
	text, ok := value.(string)
	return !ok || len(text) > longest || strings.Contains(name, "applied")
}

const leftOut = "left out by mustang sysdump"

// withoutValues leaves out of objects, in JSON, the values of containers'
// environments, where people put passwords, and of annotations that may repeat them. The names stay.
func withoutValues(text []byte) ([]byte, error) {
	in := json.NewDecoder(bytes.NewReader(text))
	in.UseNumber() // as it was written
	var list any
	if err := in.Decode(&list); err != nil {
		return nil, fmt.Errorf("read objects: %w", err)
	}
	blank(list)
	return json.Marshal(list)
}

func blank(v any) {
	switch v := v.(type) {
	case []any:
		for _, x := range v {
			blank(x)
		}
	case map[string]any:
		if env, ok := v["env"].([]any); ok {
			for _, x := range env {
				if variable, ok := x.(map[string]any); ok && variable["value"] != nil {
					variable["value"] = leftOut
				}
			}
		}
		if notes, ok := v["annotations"].(map[string]any); ok {
			for name, value := range notes {
				if holdsObject(name, value) {
					notes[name] = leftOut
				}
			}
		}
		for _, x := range v {
			blank(x)
		}
	}
}
