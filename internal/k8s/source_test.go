// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"
	"unsafe"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// pager is an API server that streams no lists, and has all objects at once for who asks for
// any version of them. What the first list goes on from expires.
type pager struct {
	pods    int
	mu      sync.Mutex
	largest int
	expired bool
}

func (p *pager) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	w.Header().Set("Content-Type", "application/json")
	refuse := func(code int, reason string) {
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": %q, "code": %d}`, reason, code)
	}
	switch {
	case q.Get("sendInitialEvents") != "":
		refuse(http.StatusUnprocessableEntity, "Invalid")
		return
	case q.Get("watch") != "":
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	first, _ := strconv.Atoi(q.Get("continue"))
	if first > 0 && !p.expired {
		p.expired = true
		refuse(http.StatusGone, "Expired")
		return
	}
	last := p.pods
	if limit, _ := strconv.Atoi(q.Get("limit")); limit > 0 && q.Get("resourceVersion") == "" {
		last = min(first+limit, last)
	}
	p.largest = max(p.largest, last-first)
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	for i := first; i < last; i++ {
		list.Items = append(list.Items, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint(i), Labels: map[string]string{"app": "web"}}})
	}
	if last < p.pods {
		list.Continue = strconv.Itoa(last)
	}
	_ = json.NewEncoder(w).Encode(list) // a reader that has gone
}

// Where the API server streams no lists, they come in pages: all of them.
func TestListsComeInPages(t *testing.T) {
	p := &pager{pods: 2*page + 3}
	server := httptest.NewServer(p)
	defer server.Close()
	w := clientOf(t, server.URL).NewWatch(slog.New(slog.DiscardHandler), Pods)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	defer func() { cancel(); <-done }()
	late := time.After(30 * time.Second)
	for !w.Synced(Pods) {
		select {
		case <-w.Signal():
		case <-late:
			t.Fatal("nothing arrives")
		}
	}
	if w.Pods.Len() != p.pods {
		t.Errorf("%d pods arrive, of %d", w.Pods.Len(), p.pods)
	}
	if p.mu.Lock(); p.largest != page || !p.expired {
		t.Errorf("the largest page has %d, want %d; one has expired: %v", p.largest, page, p.expired)
	}
	p.mu.Unlock()
	a, b := w.Pods.Get(Key{"ns", "0"}), w.Pods.Get(Key{"ns", "1"})
	if x, y := a.Labels["app"], b.Labels["app"]; x != "web" || unsafe.StringData(x) != unsafe.StringData(y) {
		t.Errorf("labels %v and %v are kept twice", a.Labels, b.Labels)
	}
}
