// SPDX-License-Identifier: Apache-2.0

package agent

// Scripts: the API's objects in, the kernel's tables out, by everything that is
// between them; and once more with each single write of each step failing, or
// being the last one of a process.

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/service"
)

func TestScripts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("BPF needs root")
	}
	s := readScript(t, "testdata/services.txt")
	failed, died := 0, 0
	inNamespace(func() {
		w := newScripted(t)
		defer w.close()
		for k, step := range s {
			if w.play(step); t.Failed() {
				return
			}
			if k == 0 {
				continue
			}
			failed += w.eachFails(s[:k], step)
			died += w.eachIsTheLast(s[:k], step)
			if t.Failed() {
				return
			}
		}
	})
	t.Logf("%d steps, %d writes failed, %d were the last", len(s), failed, died)
	if failed < 40 || died < 40 {
		t.Error("hardly a write was hit")
	}
}

// step is what there is at some time.
type step struct {
	title   string
	objects map[string]string // kind namespace/name → YAML
	tables  map[string]string // protocol (of clients outside alone: -outside) and address → the rest of its line
}

// readScript reads steps; each has the objects of those before it, too.
func readScript(t *testing.T, file string) (out []step) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	objects := map[string]string{}
	for i, part := range strings.Split(string(text), "\n## ")[1:] {
		title, body, _ := strings.Cut(part, "\n")
		in, want, ok := strings.Cut("\n"+body, "\n=>")
		if !ok {
			t.Fatalf("step %d, %s, has no line =>", i, title)
		}
		objects = maps.Clone(objects)
		var documents []string
		for line := range strings.Lines(in) {
			if name, ok := strings.CutPrefix(line, "delete "); ok {
				delete(objects, strings.TrimSpace(name))
			} else {
				documents = append(documents, line)
			}
		}
		for _, text := range strings.Split(strings.Join(documents, ""), "\n---\n") {
			var o metav1.PartialObjectMetadata
			must(t, yaml.Unmarshal([]byte(text), &o))
			if o.Kind != "" {
				objects[o.Kind+" "+o.Namespace+"/"+o.Name] = text
			}
		}
		s := step{title, objects, map[string]string{}}
		for line := range strings.Lines(want) {
			if f := strings.SplitN(strings.TrimSpace(line), " ", 3); len(f) > 1 {
				s.tables[f[0]+" "+f[1]] = strings.Join(f[2:], "")
			}
		}
		out = append(out, s)
	}
	return out
}

// scripted is an agent without an API server: a script tells what it would.
type scripted struct {
	t      *testing.T
	config Config
	faults faults
	agent  *Agent
}

func newScripted(t *testing.T) *scripted {
	t.Helper()
	dir := t.TempDir()
	mount := filepath.Join(dir, "bpf")
	must(t, os.Mkdir(mount, 0o700))
	must(t, unix.Mount("bpf", mount, "bpf", 0, ""))
	t.Cleanup(func() { check(t, unix.Unmount(mount, unix.MNT_DETACH)) })
	kubeconfig := filepath.Join(dir, "kubeconfig")
	must(t, os.WriteFile(kubeconfig, []byte("{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: k, user: u}}], "+
		"clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}"), 0o600))
	w := &scripted{t: t, config: Defaults()}
	w.config.Node, w.config.Kubeconfig, w.config.NodeMode, w.config.Devices, w.config.HostServices = "n1", kubeconfig, None, []string{None}, false
	w.config.BPFFS, w.config.StateDir = filepath.Join(mount, "scope"), filepath.Join(dir, "state")
	w.open()
	return w
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// inNamespace runs fn on a thread with a network namespace of its own, which ends
// with it.
func inNamespace(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			panic(err)
		}
		fn()
	}()
	<-done
}

// open is a process that starts.
func (w *scripted) open() {
	w.t.Helper()
	log := slog.New(slog.DiscardHandler)
	client, err := k8s.Connect(w.config.access())
	must(w.t, err)
	w.faults = faults{&fault{}}
	e, err := engine.Open(w.t.Context(), w.config.scope(), engine.Options{
		Node: service.Node{Name: w.config.Node}, Fed: true, Faults: w.faults.stand,
		Sizes: datapath.Sizes{CT: 1024, CTNew: 1024, Services: 4096, Slots: 65536, Backends: 65536},
	})
	must(w.t, err)
	w.agent = assemble(w.config, log, client, e, nil)
}

func (w *scripted) close() { check(w.t, w.agent.Close()) }

// tell makes the objects all that there are.
func (w *scripted) tell(s step) {
	w.t.Helper()
	var services, slices []any
	for _, name := range slicesSorted(s.objects) {
		text := []byte(s.objects[name])
		var err error
		switch kind, _, _ := strings.Cut(name, " "); kind {
		case "Service":
			var o corev1.Service
			err = yaml.UnmarshalStrict(text, &o)
			services = append(services, &o)
		case "EndpointSlice":
			var o discoveryv1.EndpointSlice
			err = yaml.UnmarshalStrict(text, &o)
			slices = append(slices, &o)
		default:
			err = fmt.Errorf("%s is of no kind that scripts have", name)
		}
		must(w.t, err)
	}
	w.tellObjects(services, slices)
}

func (w *scripted) tellObjects(services, slices []any) {
	w.t.Helper()
	watch := w.agent.watch
	check(w.t, errors.Join(watch.Nodes.Replace([]any{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.config.Node}}}, ""),
		watch.Pods.Replace(nil, ""), watch.Namespaces.Replace(nil, ""), watch.Policies.Replace(nil, ""),
		watch.Services.Replace(services, ""), watch.Slices.Replace(slices, "")))
}

func slicesSorted(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

// turn has the agent apply what it was told, and what failed before.
func (w *scripted) turn() {
	w.agent.sync.due = time.Time{}
	w.agent.sync.step(w.t.Context())
}

// play is a step as it should be.
func (w *scripted) play(s step) {
	w.t.Helper()
	w.tell(s)
	w.turn()
	w.is(s)
}

// rewind plays what was before a step, from the first on: who holds what is a
// matter of who came first.
func (w *scripted) rewind(before []step) (last step) {
	w.t.Helper()
	for _, s := range before {
		w.play(s)
		last = s
	}
	return last
}

// is wants the tables to be as the step says.
func (w *scripted) is(s step) {
	w.t.Helper()
	if got := w.tables(); !maps.Equal(got, s.tables) {
		w.t.Errorf("%s: the tables are\n%s\nand are to be\n%s", s.title, lines(got), lines(s.tables))
	}
}

// isBetween wants each frontend as one step or the other has it.
func (w *scripted) isBetween(old, now step, when string) {
	w.t.Helper()
	got := w.tables()
	for _, all := range []map[string]string{got, old.tables, now.tables} {
		for f := range all {
			g, there := got[f]
			o, was := old.tables[f]
			n, is := now.tables[f]
			if !(there == was && g == o || there == is && g == n) {
				w.t.Errorf("%s, %s: %s has %q (%v), neither %q (%v) as before nor %q (%v)", now.title, when, f, g, there, o, was, n, is)
			}
		}
	}
}

// tables is what the kernel holds, read anew.
func (w *scripted) tables() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	must(w.t, w.agent.with(w.t.Context(), func(e *engine.Engine) error {
		list, err := e.Services()
		for _, b := range list {
			backends := make([]string, len(b.Backends))
			for i, a := range b.Backends {
				backends[i] = a.String()
			}
			slices.SortFunc(backends, func(a, b string) int {
				return netip.MustParseAddrPort(a).Compare(netip.MustParseAddrPort(b))
			})
			if b.Drop {
				backends = append(backends, "silent")
			}
			if b.Affinity > 0 {
				backends = append(backends, "affinity="+b.Affinity.String())
			}
			protocol := b.Frontend.Protocol.String()
			if b.Outside {
				protocol += "-outside"
			}
			out[protocol+" "+b.Frontend.AddrPort.String()] = strings.Join(backends, " ")
		}
		return err
	}))
	return out
}

func lines(m map[string]string) string {
	var out strings.Builder
	for _, k := range slicesSorted(m) {
		fmt.Fprintln(&out, k, m[k])
	}
	return out.String()
}

// eachFails has each write of a step fail once. Whatever could not be applied
// is named, is as it was, and is applied with the next try.
func (w *scripted) eachFails(before []step, now step) (hit int) {
	w.t.Helper()
	for n := 1; !w.t.Failed(); n++ {
		old := w.rewind(before)
		w.faults.begin(n, false)
		w.tell(now)
		w.turn()
		if !w.faults.end() {
			w.is(now)
			return hit
		}
		hit++
		w.isBetween(old, now, fmt.Sprintf("write %d failed", n))
		problems := fmt.Sprint(w.agent.problems.list())
		if waits := len(w.agent.sync.retry) > 0; waits != strings.Contains(problems, errInjected.Error()) {
			w.t.Errorf("%s, write %d failed: something waits: %v; the problems are %s", now.title, n, waits, problems)
		}
		w.turn()
		w.is(now)
		if problems = fmt.Sprint(w.agent.problems.list()); strings.Contains(problems, errInjected.Error()) {
			w.t.Errorf("%s, after write %d had failed: %s", now.title, n, problems)
		}
	}
	return hit
}

// eachIsTheLast has nothing written from each write of a step on, until the next
// process comes.
func (w *scripted) eachIsTheLast(before []step, now step) (hit int) {
	w.t.Helper()
	for n := 1; !w.t.Failed(); n++ {
		old := w.rewind(before)
		w.faults.begin(n, true)
		w.tell(now)
		w.turn()
		reached := w.faults.end()
		w.close()
		w.open()
		if !reached {
			w.play(now)
			return hit
		}
		hit++
		w.isBetween(old, now, fmt.Sprintf("write %d was the last", n))
		w.play(now)
	}
	return hit
}

var errInjected = errors.New("injected fault")

// faults fails the n-th write to any table of Services, or all from that one on.
type faults struct{ *fault }

type fault struct {
	left    int
	forEver bool
	hit     bool
	about   netip.Prefix // no frontend in it can be written
	unfit   netip.Prefix // no frontend in it has room
	puts    func()       // is told of each Put, when given
}

func (f *faults) begin(n int, forEver bool) { *f.fault = fault{left: n, forEver: forEver} }

// end says whether a write failed, and lets all pass.
func (f *faults) end() bool {
	hit := f.hit
	*f.fault = fault{}
	return hit
}

func (f *fault) write() error {
	if f.left == 0 {
		return nil
	}
	if f.left--; f.left > 0 {
		return nil
	}
	f.hit = true
	if f.forEver {
		f.left = 1
	}
	return errInjected
}

func (f *faults) stand(t reconcile.ServiceTables) reconcile.ServiceTables {
	if !f.forEver {
		f.fault = &fault{about: f.about, unfit: f.unfit, puts: f.puts}
	}
	return reconcile.ServiceTables{
		Frontends: faulty[datapath.FrontendKey, datapath.Frontend]{t.Frontends, f.fault},
		Slots:     faulty[datapath.SlotKey, uint32]{t.Slots, f.fault},
		Backends:  faulty[uint32, datapath.Backend]{t.Backends, f.fault},
		Sources:   faulty[datapath.SourceKey, uint8]{t.Sources, f.fault},
		Meta:      faulty[uint32, datapath.Meta]{t.Meta, f.fault},
	}
}

// faulty is a table that faults stand before.
type faulty[K, V comparable] struct {
	reconcile.Table[K, V]
	f *fault
}

func (t faulty[K, V]) Put(keys []K, values []V) error {
	if t.f.puts != nil {
		t.f.puts()
	}
	if len(keys) > 0 {
		if err := t.f.write(); err != nil {
			return err
		}
	}
	for _, k := range keys {
		k, ok := any(k).(datapath.FrontendKey)
		if ok && t.f.about.Contains(datapath.ToAddr(k.Addr)) {
			return errInjected
		}
		if ok && t.f.unfit.Contains(datapath.ToAddr(k.Addr)) {
			return &datapath.FullError{Table: "a test's"}
		}
	}
	return t.Table.Put(keys, values)
}

func (t faulty[K, V]) Delete(keys []K) error {
	if len(keys) > 0 {
		if err := t.f.write(); err != nil {
			return err
		}
	}
	return t.Table.Delete(keys)
}
