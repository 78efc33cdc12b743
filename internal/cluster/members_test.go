// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// connect is a cluster whose API server is handler; notes get what is told.
func connect(t *testing.T, handler http.HandlerFunc, notes *[]string) *Cluster {
	t.Helper()
	s := httptest.NewServer(handler)
	t.Cleanup(s.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"clusters": [{"name": "c", "cluster": {"server": "` + s.URL + `"}}], "contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Connect(file, func(sentence string) { *notes = append(*notes, sentence) })
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// lists answers with nodes and pods.
func lists(nodes []corev1.Node, pods []corev1.Pod) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		var list any = corev1.PodList{Items: pods}
		if r.URL.Path == "/api/v1/nodes" {
			list = corev1.NodeList{Items: nodes}
		}
		json.NewEncoder(w).Encode(list)
	}
}

// A pod that calls itself an agent, in whatever namespace, is none: else its image would be
// started in nodes' networks by the connectivity test.
func TestAPodThatCallsItselfAnAgentIsNone(t *testing.T) {
	pod := func(namespace string, host bool) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "mustang-x"},
			Spec: corev1.PodSpec{NodeName: "n1", HostNetwork: host, Containers: []corev1.Container{{Name: container, Image: namespace}}}}
	}
	c := connect(t, lists([]corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}},
		[]corev1.Pod{pod("a-tenant", false), pod("kube-system", true), pod("tenant", false)}), new([]string))
	list, err := c.members(t.Context())
	if err != nil || len(list) != 1 || list[0].agent == nil || list[0].agent.Namespace != "kube-system" {
		t.Errorf("members: %+v, %v", list, err)
	}
}
