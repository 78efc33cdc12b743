// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/mustang-net/mustang/internal/state"
)

// Kind is a kind of object that can be watched.
type Kind string

// The kinds.
const (
	Services   Kind = "Service"
	Slices     Kind = "EndpointSlice"
	Nodes      Kind = "Node"
	Pods       Kind = "Pod"
	Namespaces Kind = "Namespace"
	Policies   Kind = "NetworkPolicy"
)

// Change says that an object is not what it was when Take last spoke of it.
// What it is now is in its table; absent: it is gone.
type Change struct {
	Kind Kind
	Key  Key
	At   time.Time // when the first of the changes that this stands for arrived
}

// Watch follows objects of the kinds that it was made for. A table of another
// kind is nil.
type Watch struct {
	Services   *Table[Service]
	Slices     *Table[Slice]
	Nodes      *Table[Node]
	Pods       *Table[Pod]
	Namespaces *Table[Namespace]
	Policies   *Table[Policy]

	log  *slog.Logger
	runs []func(context.Context)

	mu      sync.RWMutex
	queued  map[queueKey]struct{}
	changes []Change
	synced  map[Kind]bool
	down    map[Kind]outage
	gone    []state.Backend
	signal  chan struct{}
}

type queueKey struct {
	kind Kind
	key  Key
}

// outage is a watch that has no connection.
type outage struct {
	since time.Time
	err   error
}

// ours is what kube-proxy's contract leaves to a proxy, of Services and of slices:
// not those that name another one, nor those that are called headless.
const ours = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless"

// NewWatch prepares to follow kinds; Run does it.
func (c *Client) NewWatch(log *slog.Logger, kinds ...Kind) *Watch {
	klog.SetSlogLogger(log) // client-go tells what it meets through it
	w := &Watch{
		log: log, queued: map[queueKey]struct{}{}, synced: map[Kind]bool{}, down: map[Kind]outage{},
		signal: make(chan struct{}, 1),
	}
	for _, kind := range kinds {
		w.synced[kind] = false
		w.down[kind] = outage{time.Now(), errors.New("not connected yet")}
		switch kind {
		case Services:
			w.Services = newTable(w, kind, readService, (*Service).same)
			w.follow(w.Services, c.core, "services", ours, &corev1.Service{}, &corev1.ServiceList{})
		case Slices:
			w.Slices = newTable(w, kind, readSlice, (*Slice).same)
			w.Slices.replaced = w.sliceReplaced
			w.follow(w.Slices, c.discovery, "endpointslices", ours, &discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{})
		case Nodes:
			w.Nodes = newTable(w, kind, readNode, (*Node).same)
			w.follow(w.Nodes, c.core, "nodes", "", &corev1.Node{}, &corev1.NodeList{})
		case Pods:
			w.Pods = newTable(w, kind, readPod, (*Pod).same)
			w.follow(w.Pods, c.core, "pods", "", &corev1.Pod{}, &corev1.PodList{})
		case Namespaces:
			read := func(o *corev1.Namespace) *Namespace { return &Namespace{internLabels(o.Labels)} }
			w.Namespaces = newTable(w, kind, read, (*Namespace).same)
			w.follow(w.Namespaces, c.core, "namespaces", "", &corev1.Namespace{}, &corev1.NamespaceList{})
		case Policies:
			read := func(o *networkingv1.NetworkPolicy) *Policy { return &Policy{string(o.UID), o.Spec} }
			same := func(a, b *Policy) bool { return a.UID == b.UID && reflect.DeepEqual(a.Spec, b.Spec) }
			w.Policies = newTable(w, kind, read, same)
			w.follow(w.Policies, c.networking, "networkpolicies", "", &networkingv1.NetworkPolicy{}, &networkingv1.NetworkPolicyList{})
		default:
			panic(fmt.Sprintf("no such kind: %q", kind))
		}
	}
	return w
}

// Run follows until ctx ends, and returns when nothing of it runs any more. An
// API server that is away is asked again, at first after a tenth of a second,
// at most every five.
func (w *Watch) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, run := range w.runs {
		wg.Go(func() { run(ctx) })
	}
	wg.Wait()
}

// Signal receives when there may be something for Take, or a table was filled.
func (w *Watch) Signal() <-chan struct{} { return w.signal }

// Take answers everything that changed since the last call, each object once.
func (w *Watch) Take() []Change {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.changes
	w.changes, w.queued = nil, map[queueKey]struct{}{} // not cleared: a map never shrinks
	return out
}

// TakeGone answers the endpoints that were terminating and then left their slice, with
// each port that they had there. They may be in another one.
func (w *Watch) TakeGone() []state.Backend {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.gone
	w.gone = nil
	return out
}

// sliceReplaced notes the endpoints of old that end; w.mu is held.
func (w *Watch) sliceReplaced(old, now *Slice) {
	for _, e := range old.Endpoints {
		still := func(n Endpoint) bool { return n.Addr == e.Addr }
		if e.Terminating && (now == nil || !slices.ContainsFunc(now.Endpoints, still)) {
			for _, p := range old.Ports {
				w.gone = append(w.gone, state.Backend{AddrPort: netip.AddrPortFrom(e.Addr, p.Port), Protocol: p.Protocol})
			}
		}
	}
}

// Synced says whether the tables of kinds hold all that there was at some time.
// It stays true.
func (w *Watch) Synced(kinds ...Kind) bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return !slices.ContainsFunc(kinds, func(k Kind) bool { return !w.synced[k] })
}

// Outage is since when a kind has not been followed, and why; a zero time: all are.
func (w *Watch) Outage() (since time.Time, err error) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	for _, o := range w.down {
		if since.IsZero() || o.since.Before(since) {
			since, err = o.since, o.err
		}
	}
	return since, err
}

// Behind says that pods are followed, and what decides about them is not, or is being listed
// anew: a pod may be newer than what is known of its policies. An API server that is away altogether
// makes no pods.
func (w *Watch) Behind() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	_, pods := w.down[Pods]
	_, policies := w.down[Policies]
	_, namespaces := w.down[Namespaces]
	return !pods && (policies || namespaces)
}

func (w *Watch) wake() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

// changed queues an object; w.mu is held.
func (w *Watch) changed(kind Kind, key Key, now time.Time) {
	k := queueKey{kind, key}
	if _, queued := w.queued[k]; queued {
		return
	}
	w.queued[k] = struct{}{}
	w.changes = append(w.changes, Change{kind, key, now})
}

// connected notes how an attempt to follow a kind ended.
func (w *Watch) connected(kind Kind, err error) {
	w.mu.Lock()
	old, wasDown := w.down[kind]
	switch {
	case err == nil:
		delete(w.down, kind)
	case wasDown:
		w.down[kind] = outage{old.since, err}
	default:
		w.down[kind] = outage{time.Now(), err}
	}
	w.mu.Unlock()
	if err == nil && wasDown {
		w.log.Info("following the API server", "kind", kind)
	} else if err != nil && !wasDown {
		w.log.Warn("the API server cannot be followed; everything stays as it is", "kind", kind, "error", err)
	}
}

// follower is a table as a reflector fills it.
type follower interface {
	cache.TransformingStore
	watched() Kind
}

// Table is all objects of a kind, as they are now. What it gives out is shared
// and must not be written to.
type Table[T any] struct {
	w       *Watch
	kind    Kind
	convert func(any) *T
	same    func(a, b *T) bool
	objects map[Key]*T // guarded by w.mu
	// replaced, when given, sees what an object was and is; w.mu is held.
	replaced func(old, now *T)
}

func newTable[O, T any](w *Watch, kind Kind, read func(O) *T, same func(a, b *T) bool) *Table[T] {
	return &Table[T]{w: w, kind: kind, convert: func(o any) *T { return read(o.(O)) }, same: same, objects: map[Key]*T{}}
}

// Get is the object of a key, nil when there is none.
func (t *Table[T]) Get(k Key) *T {
	t.w.mu.RLock()
	defer t.w.mu.RUnlock()
	return t.objects[k]
}

// Len is how many there are.
func (t *Table[T]) Len() int {
	t.w.mu.RLock()
	defer t.w.mu.RUnlock()
	return len(t.objects)
}

// All are all objects, in no order. Nothing changes during the loop, which must be short, and
// must not ask the Watch for anything: it would wait for itself.
func (t *Table[T]) All() iter.Seq2[Key, *T] {
	return func(yield func(Key, *T) bool) {
		t.w.mu.RLock()
		defer t.w.mu.RUnlock()
		maps.All(t.objects)(yield)
	}
}

func (t *Table[T]) watched() Kind { return t.kind }

func keyOf(o any) (Key, error) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		ns, name, err := cache.SplitMetaNamespaceKey(gone.Key)
		return Key{ns, name}, err
	}
	m, ok := o.(metav1.Object)
	if !ok {
		return Key{}, fmt.Errorf("%T has no metadata", o)
	}
	return Key{intern(m.GetNamespace()), m.GetName()}, nil
}

// entry is an object as it is kept.
type entry[T any] struct {
	key   Key
	value *T
}

// GetObjectKind implements runtime.Object: so client-go carries entries in its lists.
func (e entry[T]) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject implements runtime.Object; entries are shared.
func (e entry[T]) DeepCopyObject() runtime.Object { return e }

// read makes an entry of an object of the API. What is one already stays.
func (t *Table[T]) read(o any) (entry[T], error) {
	if e, ok := o.(entry[T]); ok {
		return e, nil
	}
	k, err := keyOf(o)
	if err != nil {
		return entry[T]{}, err
	}
	return entry[T]{k, t.convert(o)}, nil
}

// set enters an object; w.mu is held.
func (t *Table[T]) set(k Key, v *T, now time.Time) {
	old := t.objects[k]
	t.objects[k] = v
	if old == nil || !t.same(old, v) {
		t.changed(k, old, v, now)
	}
}

// remove forgets an object; w.mu is held.
func (t *Table[T]) remove(k Key, now time.Time) {
	if old := t.objects[k]; old != nil {
		delete(t.objects, k)
		t.changed(k, old, nil, now)
	}
}

func (t *Table[T]) changed(k Key, old, v *T, now time.Time) {
	t.w.changed(t.kind, k, now)
	if t.replaced != nil && old != nil {
		t.replaced(old, v)
	}
}

// Add implements cache.ReflectorStore.
func (t *Table[T]) Add(o any) error {
	e, err := t.read(o)
	if err != nil {
		return err
	}
	t.w.mu.Lock()
	t.set(e.key, e.value, time.Now())
	t.w.mu.Unlock()
	t.w.wake()
	return nil
}

// Update implements cache.ReflectorStore.
func (t *Table[T]) Update(o any) error { return t.Add(o) }

// Delete implements cache.ReflectorStore.
func (t *Table[T]) Delete(o any) error {
	k, err := keyOf(o)
	if err != nil {
		return err
	}
	t.w.mu.Lock()
	t.remove(k, time.Now())
	t.w.mu.Unlock()
	t.w.wake()
	return nil
}

// Replace implements cache.ReflectorStore: list is all that there is.
func (t *Table[T]) Replace(list []any, _ string) error {
	fresh := make(map[Key]*T, len(list))
	for i, o := range list {
		e, err := t.read(o)
		if err != nil {
			return err
		}
		fresh[e.key] = e.value
		list[i] = nil // let go of it while the rest is read
	}
	now := time.Now()
	t.w.mu.Lock()
	for k := range t.objects {
		if fresh[k] == nil {
			t.remove(k, now)
		}
	}
	for k, v := range fresh {
		t.set(k, v, now)
	}
	t.w.synced[t.kind] = true
	t.w.mu.Unlock()
	t.w.connected(t.kind, nil)
	t.w.wake()
	return nil
}

// Resync implements cache.ReflectorStore; nothing here forgets.
func (t *Table[T]) Resync() error { return nil }

// Transformer implements cache.TransformingStore: of everything that there is,
// which arrives object by object, only what is kept is in memory at once.
func (t *Table[T]) Transformer() cache.TransformFunc {
	return func(o any) (any, error) { return t.read(o) }
}
