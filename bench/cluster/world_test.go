// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A pod waits for its namespace's service account, and for nothing else.
func TestAPodWaitsForTheServiceAccount(t *testing.T) {
	answers := []struct {
		code int
		text string
	}{
		{403, `{"message": "pods \"client\" is forbidden: error looking up service account b/default: serviceaccount \"default\" not found"}`},
		{201, `{}`},
		{403, `{"message": "pods \"client\" is forbidden: violates PodSecurity"}`},
	}
	asked := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(answers[asked].code)
		w.Write([]byte(answers[asked].text))
		asked++
	}))
	defer s.Close()
	w := &world{api: &api{s.URL, s.Client()}, namespace: "b"}
	if err := w.make(t.Context(), member{name: client}); err != nil || asked != 2 {
		t.Errorf("asked %d times: %v", asked, err)
	}
	if err := w.make(t.Context(), member{name: client}); err == nil || !strings.Contains(err.Error(), "PodSecurity") || asked != 3 {
		t.Errorf("asked %d times: %v", asked, err)
	}
}
