// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation"
)

// eventServer keeps events by name, as an API server does: of one name, one.
type eventServer struct {
	t      *testing.T
	events map[string]corev1.Event
	asked  []string // method and path of each request
}

func newEventServer(t *testing.T) (*eventServer, *Client) {
	t.Helper()
	s := &eventServer{t: t, events: map[string]corev1.Event{}}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return s, clientOf(t, server.URL)
}

func clientOf(t *testing.T, url string) *Client {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf("{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: k, user: u}}], "+
		"clusters: [{name: k, cluster: {server: '%s'}}], users: [{name: u, user: {}}]}", url)
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Connect(Access{Kubeconfig: kubeconfig})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (s *eventServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.asked = append(s.asked, r.Method+" "+r.URL.Path)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		s.t.Error(err)
	}
	scheme, err := newScheme()
	if err != nil {
		s.t.Error(err)
	}
	var e corev1.Event
	if _, _, err := serializer.NewCodecFactory(scheme).UniversalDeserializer().Decode(body, nil, &e); err != nil {
		s.t.Error(err)
	}
	w.Header().Set("Content-Type", "application/json")
	if _, there := s.events[e.Name]; there {
		w.WriteHeader(http.StatusConflict)
		fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "AlreadyExists", "code": 409}`)
		return
	}
	s.events[e.Name] = e
	w.WriteHeader(http.StatusCreated)
	fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Event"}`)
}

func TestAnEventIsWrittenOnce(t *testing.T) {
	s, c := newEventServer(t)
	web := Key{"shop", "web"}
	for _, x := range []struct {
		title               string
		node, uid, sentence string
		events              int // that there are then
	}{
		{"the first", "n1", "u1", "it is wrong", 1},
		{"again, as after a restart", "n1", "u1", "it is wrong", 1},
		{"of another node", "n2", "u1", "it is wrong", 2},
		{"another sentence", "n1", "u1", "it is wrong in another way", 3},
		{"of the object's successor", "n1", "u2", "it is wrong", 4},
	} {
		if err := c.Events(x.node).Warn(t.Context(), Services, web, x.uid, x.sentence); err != nil {
			t.Errorf("%s: %v", x.title, err)
		}
		if len(s.events) != x.events {
			t.Errorf("%s: there are %d events, want %d", x.title, len(s.events), x.events)
		}
	}
	for name, e := range s.events {
		if o := e.InvolvedObject; o.Kind != "Service" || o.Namespace != "shop" || o.Name != "web" || o.UID != "u1" && o.UID != "u2" {
			t.Errorf("%s is of %+v", name, o)
		}
	}
	for _, asked := range s.asked {
		if asked != "POST /api/v1/namespaces/shop/events" {
			t.Errorf("%s: the agent has the right to create events alone", asked)
		}
	}
}

func TestAnEventOfLongNamesAndSentencesFits(t *testing.T) {
	s, c := newEventServer(t)
	for _, x := range []struct{ name, node, sentence string }{
		{strings.Repeat("a", 253), strings.Repeat("n", 253), "short"},
		{strings.Repeat("a", 235) + "." + strings.Repeat("b", 17), "n1", "its name would be cut behind a dot"},
		{"web", "n1", "a" + strings.Repeat("é", 600)}, // the limit falls into a character
		{"web", "n1", "not \xff text"},
	} {
		clear(s.events)
		if err := c.Events(x.node).Warn(t.Context(), Policies, Key{"shop", x.name}, "u1", x.sentence); err != nil {
			t.Errorf("%s: %v", x.sentence, err)
		}
		for name, e := range s.events {
			if wrong := validation.IsDNS1123Subdomain(name); len(wrong) > 0 {
				t.Errorf("%s is no name: %v", name, wrong)
			}
			if !utf8.ValidString(e.Message) || len(e.Message) > 1024 || len(e.Message) < min(len(x.sentence)-1, 1023) {
				t.Errorf("a sentence of %d bytes is told in %d: %q", len(x.sentence), len(e.Message), e.Message)
			}
		}
	}
}
