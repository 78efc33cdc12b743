// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"slices"
	"strings"
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
	var ds appsv1.DaemonSet
	objectOf(t, "DaemonSet", &ds, set...)
	return ds.Spec.Template.Spec
}

// objectOf reads the chart's first object of a kind into to.
func objectOf(t *testing.T, kind string, to any, set ...string) {
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
		if !bytes.Contains(doc, []byte("\nkind: "+kind+"\n")) {
			continue
		}
		if err := yaml.UnmarshalStrict(doc, to); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatalf("no %s is in:\n%s", kind, text)
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
func TestImagesOfAPrivateRegistry(t *testing.T) {
	for _, uninstall := range []string{"uninstall=false", "uninstall=true"} {
		pod := podOf(t, uninstall, "imagePullSecrets[0].name=key", "image.repository=registry.test/mustang", "image.tag=x")
		if len(pod.ImagePullSecrets) != 1 || pod.ImagePullSecrets[0].Name != "key" {
			t.Errorf("%s: it pulls with %v", uninstall, pod.ImagePullSecrets)
		}
		for _, c := range workers(t, pod) {
			if c.Image != "registry.test/mustang:x" {
				t.Errorf("%s: %s is of %s", uninstall, c.Name, c.Image)
			}
		}
	}
}

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

// Where mustang connects no pods, plugins' and lists' directories are neither
// mounted nor made on the node, and the uninstall is not told of any.
func TestPluginsDirectoriesOnlyWhereUsed(t *testing.T) {
	for set, want := range map[string]bool{
		"agent.cni-conf-dir=none": false, "agent.cni-conf-dir=null": false, "agent.cni-conf-dir=/etc/cni/net.d": true,
	} {
		for _, uninstall := range []string{"uninstall=false", "uninstall=true"} {
			pod := podOf(t, uninstall, set)
			for _, name := range []string{"cni-conf", "cni-bin"} {
				if slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name }) != want {
					t.Errorf("%s, %s: volume %s is there: %v", uninstall, set, name, !want)
				}
			}
			for _, c := range workers(t, pod) {
				for _, m := range c.VolumeMounts {
					if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
						t.Errorf("%s, %s: %s mounts %s, which is no volume", uninstall, set, c.Name, m.Name)
					}
				}
				told := slices.ContainsFunc(c.Args, func(a string) bool { return strings.HasPrefix(a, "--bin-dir") || strings.HasPrefix(a, "--conf-dir") })
				if c.Name == "uninstall" && told != want {
					t.Errorf("%s: uninstall is told of directories: %v", set, c.Args)
				}
			}
		}
	}
}

// The agent refuses to be told how to connect pods where it connects none; the chart's defaults say it.
func TestPluginsConfigurationOnlyWhereUsed(t *testing.T) {
	for set, want := range map[string]bool{"agent.cni-conf-dir=none": false, "agent.cni-conf-dir=null": false, "agent.log-level=info": true} {
		var config corev1.ConfigMap
		objectOf(t, "ConfigMap", &config, set)
		var agent map[string]any
		if err := yaml.Unmarshal([]byte(config.Data["agent.yaml"]), &agent); err != nil || len(agent) == 0 {
			t.Fatal(agent, err)
		}
		if _, told := agent["cni"]; told != want {
			t.Errorf("%s: the agent is told %v", set, agent)
		}
	}
}

func TestUninstallHasTheAgentsScope(t *testing.T) {
	for _, c := range []struct{ set, want string }{
		{"host.bpffs=/bpf", "--bpffs=/bpf/mustang"},
		{"host.run=/run/other", "--state-dir=/run/other"},
		{"agent.cgroup-root=/sys/fs/cgroup/unified", "--cgroup-root=/sys/fs/cgroup/unified"},
		{"host.cgroup=/run/cgroup2", "--cgroup-root=/run/cgroup2"},
	} {
		if args := workers(t, podOf(t, "uninstall=true", c.set))[0].Args; !slices.Contains(args, c.want) {
			t.Errorf("%s: uninstall %v, want %s", c.set, args, c.want)
		}
	}
	for _, arg := range workers(t, podOf(t, "uninstall=true"))[0].Args {
		if strings.HasPrefix(arg, "--cgroup-root") {
			t.Errorf("nobody names a cgroup root: %s", arg)
		}
	}
}

// What is run in the agent's container, as `status --cluster` does, is about the
// agent's scope.
func TestTheContainerNamesTheScope(t *testing.T) {
	pod := podOf(t, "host.bpffs=/bpf", "host.run=/run/other", "agent.cgroup-root=/sys/fs/cgroup/unified")
	got := map[string]string{}
	for _, e := range pod.Containers[0].Env {
		got[e.Name] = e.Value
	}
	for name, want := range map[string]string{
		"MUSTANG_BPFFS": "/bpf/mustang", "MUSTANG_STATE_DIR": "/run/other", "MUSTANG_CGROUP_ROOT": "/sys/fs/cgroup/unified",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
}

// Where the cgroups are mounted from elsewhere, the agent looks there, unless it is told otherwise.
func TestTheAgentLooksWhereCgroupsAreMounted(t *testing.T) {
	for set, want := range map[string]string{
		"host.cgroup=/sys/fs/cgroup": "", "host.cgroup=/run/cgroup2": "/run/cgroup2",
		"host.cgroup=/run/cgroup2,agent.cgroup-root=/run/cgroup2/unified": "/run/cgroup2/unified",
	} {
		var config corev1.ConfigMap
		objectOf(t, "ConfigMap", &config, set)
		var agent struct {
			Root string `json:"cgroup-root"`
		}
		if err := yaml.Unmarshal([]byte(config.Data["agent.yaml"]), &agent); err != nil || agent.Root != want {
			t.Errorf("%s: the agent looks at %q (%v), want %q", set, agent.Root, err, want)
		}
		env := ""
		for _, e := range podOf(t, set).Containers[0].Env {
			if e.Name == "MUSTANG_CGROUP_ROOT" {
				env = e.Value
			}
		}
		if env != want {
			t.Errorf("%s: commands in the container look at %q, want %q", set, env, want)
		}
	}
}

// The kubelet asks where the agent listens.
func TestProbesAskWhereTheAgentListens(t *testing.T) {
	for address, want := range map[string]string{
		"[::]:10256": "127.0.0.1", "0.0.0.0:10256": "127.0.0.1", "127.0.0.1:10256": "127.0.0.1",
		"[::1]:10256": "::1", "[2001:db8::1]:10256": "2001:db8::1", "192.0.2.7:10256": "192.0.2.7",
	} {
		agent := podOf(t, "agent.health-address="+address).Containers[0]
		for _, probe := range []*corev1.Probe{agent.StartupProbe, agent.LivenessProbe, agent.ReadinessProbe} {
			if got := probe.HTTPGet; got.Host != want || got.Port.IntValue() != 10256 {
				t.Errorf("the agent listens at %s, the kubelet asks %s:%s", address, got.Host, got.Port.String())
			}
		}
	}
}

// wrong is what is said against values that the chart refuses; "": it takes them.
func wrong(t *testing.T, values map[string]any) string {
	t.Helper()
	if _, err := render("../..", "kube-system", values); err != nil {
		return err.Error()
	}
	return ""
}

// A node's agent holds what the next one waits for: a second beside it is never ready, and the first would never go.
func TestNoAgentComesBesideAnother(t *testing.T) {
	for surge, ok := range map[any]bool{0: true, "0%": true, 1: false, "10%": false} {
		values := map[string]any{"updateStrategy": map[string]any{"type": "RollingUpdate", "rollingUpdate": map[string]any{"maxUnavailable": 2, "maxSurge": surge}}}
		if got := wrong(t, values); (got == "") != ok || !ok && !strings.Contains(got, "maxSurge") {
			t.Errorf("maxSurge %v: %q", surge, got)
		}
	}
}

// All nodes have the ConfigMap: one pool would be given out by each.
func TestAPoolIsNotAllNodes(t *testing.T) {
	agent := func(cni map[string]any) map[string]any { return map[string]any{"cni": cni} }
	pools := map[string]any{"ipam": map[string]any{"type": "mustang", "pools": []any{"10.1.0.0/24"}}}
	for _, c := range []struct {
		values map[string]any
		wrong  bool
	}{
		{map[string]any{"agent": agent(pools)}, true},
		{map[string]any{"agent": agent(pools), "nodeSelector": map[string]any{"network": "mustang"}}, true},
		{map[string]any{"agent": agent(pools), "nodeSelector": map[string]any{"kubernetes.io/hostname": "n1"}}, false},
		{map[string]any{"agent": agent(pools), "uninstall": true}, false},
		{map[string]any{"agent": agent(map[string]any{"ipam": map[string]any{"type": "dhcp"}})}, false},
		{map[string]any{"agent": agent(nil)}, false},
	} {
		if got := wrong(t, c.values); (got != "") != c.wrong || c.wrong && !strings.Contains(got, "agent.cni.ipam.pools") {
			t.Errorf("%v: %q, want a refusal: %t", c.values, got, c.wrong)
		}
	}
}
