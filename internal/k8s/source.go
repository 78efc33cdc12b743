// SPDX-License-Identifier: Apache-2.0

package k8s

// How objects come from the API server: a stream of all that there are where it can, else
// pages, and then a stream of what changes.

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// source lists and watches one resource.
type source struct {
	w        *Watch
	kind     Kind
	client   rest.Interface
	resource string
	selector string
	list     runtime.Object
	keep     cache.TransformFunc // makes an entry of an object
}

// page is how many objects are asked for at once, where the API server streams no list.
const page = 500

// ListWithContext asks in pages, whatever client-go asks for: of any resource version but the
// latest an API server would answer all objects at once, which are more than there is room for.
func (s source) ListWithContext(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
	all := &metainternalversion.List{}
	for {
		err := s.addPage(ctx, all)
		if ctx.Err() == nil && err != nil { // else Replace says so: until then the table is of before
			s.w.connected(s.kind, err)
		}
		if err != nil || all.Continue == "" {
			return all, err
		}
	}
}

// addPage asks for what follows, and adds what is kept of it.
func (s source) addPage(ctx context.Context, all *metainternalversion.List) error {
	o := metav1.ListOptions{LabelSelector: s.selector, Limit: page, Continue: all.Continue}
	out := s.list.DeepCopyObject()
	if err := s.client.Get().Resource(s.resource).VersionedParams(&o, metav1.ParameterCodec).Do(ctx).Into(out); err != nil {
		return err
	}
	m, err := meta.ListAccessor(out)
	if err != nil {
		return err
	}
	all.ResourceVersion, all.Continue = m.GetResourceVersion(), m.GetContinue()
	return meta.EachListItem(out, func(o runtime.Object) error {
		kept, err := s.keep(o)
		if err == nil {
			all.Items = append(all.Items, kept.(runtime.Object))
		}
		return err
	})
}

func (s source) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.LabelSelector, o.Watch = s.selector, true
	in, err := s.client.Get().Resource(s.resource).VersionedParams(&o, metav1.ParameterCodec).Watch(ctx)
	whole := o.SendInitialEvents != nil && *o.SendInitialEvents // it is a list, too
	if ctx.Err() == nil && (err != nil || !whole) {
		s.w.connected(s.kind, err)
	}
	if err != nil {
		return in, err
	}
	return s.heard(ctx, in), nil
}

// heard passes events on. After one that is an error a watch does not go on from where
// it was, and until there is another list the table is of before.
func (s source) heard(ctx context.Context, in watch.Interface) watch.Interface {
	events := make(chan watch.Event)
	out := watch.NewProxyWatcher(events)
	go func() {
		defer close(events)
		defer in.Stop()
		for {
			select {
			case <-out.StopChan():
				return
			case e, more := <-in.ResultChan():
				if !more {
					return
				}
				if e.Type == watch.Error && ctx.Err() == nil {
					s.w.connected(s.kind, apierrors.FromObject(e.Object))
				}
				select {
				case <-out.StopChan():
					return
				case events <- e:
				}
			}
		}
	}()
	return out
}

// List and Watch are the same for callers without a context, of which there are none.
func (s source) List(o metav1.ListOptions) (runtime.Object, error) {
	return s.ListWithContext(context.Background(), o)
}

func (s source) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return s.WatchWithContext(context.Background(), o)
}

func (w *Watch) follow(t follower, client rest.Interface, resource, selector string, one, list runtime.Object) {
	src := source{w, t.watched(), client, resource, selector, list, t.Transformer()}
	w.runs = append(w.runs, func(ctx context.Context) {
		r := cache.NewReflectorWithOptions(src, one, t, cache.ReflectorOptions{
			Name: "mustang/" + resource,
			Backoff: &wait.Backoff{
				Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 5 * time.Second,
			},
		})
		r.RunWithContext(ctx)
	})
}
