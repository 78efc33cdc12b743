// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"slices"
	"testing"

	"helm.sh/helm/v3/pkg/strvals"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// podOf is the pod of the DaemonSet that the chart gives with --set, read by
// Kubernetes' own types: a field that these do not have is an error.
func podOf(t *testing.T, set ...string) corev1.PodSpec {
	t.Helper()
	values := map[string]any{}
	for _, s := range set {
		if err := strvals.ParseInto(s, values); err != nil {
			t.Fatal(err)
		}
	}
	text, err := render("../..", "kube-system", values)
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		var ds appsv1.DaemonSet
		if !bytes.Contains(doc, []byte("\nkind: DaemonSet\n")) {
			continue
		}
		if err := yaml.UnmarshalStrict(doc, &ds); err != nil {
			t.Fatal(err)
		}
		return ds.Spec.Template.Spec
	}
	t.Fatalf("no DaemonSet is in:\n%s", text)
	return corev1.PodSpec{}
}

// workers are the containers that work on the node.
func workers(t *testing.T, pod corev1.PodSpec) []corev1.Container {
	t.Helper()
	var out []corev1.Container
	for _, c := range append(pod.InitContainers, pod.Containers...) {
		if c.Name != "done" {
			out = append(out, c)
		}
	}
	if len(out) == 0 {
		t.Fatal("no container works on the node")
	}
	return out
}

// AppArmor's and SELinux's default profiles forbid what the agent is for,
// whatever its capabilities.
func TestRuntimesProfilesDoNotConfine(t *testing.T) {
	for _, uninstall := range []string{"uninstall=false", "uninstall=true"} {
		for _, c := range workers(t, podOf(t, uninstall)) {
			s := c.SecurityContext
			if s.AppArmorProfile == nil || s.AppArmorProfile.Type != corev1.AppArmorProfileTypeUnconfined {
				t.Errorf("%s, %s: AppArmor profile %v, want Unconfined", uninstall, c.Name, s.AppArmorProfile)
			}
			if s.SELinuxOptions == nil || s.SELinuxOptions.Type != "spc_t" || s.SELinuxOptions.Level != "s0" {
				t.Errorf("%s, %s: SELinux %v, want spc_t at s0", uninstall, c.Name, s.SELinuxOptions)
			}
		}
		for _, c := range workers(t, podOf(t, uninstall, "appArmorProfile=null", "seLinuxOptions=null")) {
			if s := c.SecurityContext; s.AppArmorProfile != nil || s.SELinuxOptions != nil {
				t.Errorf("%s, %s: null is not the runtime's: %v, %v", uninstall, c.Name, s.AppArmorProfile, s.SELinuxOptions)
			}
		}
	}
}

// Root without any right is kept from directories of others, as Kubespray's
// /opt/cni/bin is.
func TestDirectoriesMayBeOthers(t *testing.T) {
	for _, uninstall := range []string{"uninstall=false", "uninstall=true"} {
		for _, c := range workers(t, podOf(t, uninstall)) {
			rights := c.SecurityContext.Capabilities
			if !slices.Contains(rights.Drop, "ALL") || !slices.Contains(rights.Add, "DAC_OVERRIDE") {
				t.Errorf("%s, %s: capabilities %v, want all dropped and DAC_OVERRIDE added", uninstall, c.Name, rights)
			}
		}
	}
}
