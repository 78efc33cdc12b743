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

// A pod that calls itself an agent, in whatever namespace, is none: else its image would be
// started in nodes' networks by the connectivity test.
func TestAPodThatCallsItselfAnAgentIsNone(t *testing.T) {
	pod := func(namespace string, host bool) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "mustang-x"},
			Spec: corev1.PodSpec{NodeName: "n1", HostNetwork: host, Containers: []corev1.Container{{Name: container, Image: namespace}}}}
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		var list any = corev1.PodList{Items: []corev1.Pod{pod("a-tenant", false), pod("kube-system", true), pod("tenant", false)}}
		if r.URL.Path == "/api/v1/nodes" {
			list = corev1.NodeList{Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}}}
		}
		json.NewEncoder(w).Encode(list)
	}))
	defer s.Close()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"clusters": [{"name": "c", "cluster": {"server": "` + s.URL + `"}}], "contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Connect(file, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.members(t.Context())
	if err != nil || len(list) != 1 || list[0].agent == nil || list[0].agent.Namespace != "kube-system" {
		t.Errorf("members: %+v, %v", list, err)
	}
}
