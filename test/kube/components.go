// SPDX-License-Identifier: Apache-2.0

// This file is the configuration of every program of a cluster.

package kube

import (
	"fmt"
	"path/filepath"
	"strings"
)

const (
	etcKubernetes = "/etc/kubernetes"
	// apiReady is made in a machine's /etc/kubernetes when the API server answers.
	apiReady = "api-ready"
	// nodeKnown is made in a node's when the API server has the node and its pods' networks:
	// a kube-proxy waits thirty seconds for that, and goes on without.
	nodeKnown        = "node-known"
	containerdSocket = "/run/containerd/containerd.sock"
	etcdURL          = "http://127.0.0.1:2379"
	cniPlugins       = "/usr/lib/cni"
)

func etcFile(name string) string { return filepath.Join(etcKubernetes, name) }

// stopped is the file that keeps a daemon from being started again.
func stopped(daemon string) string { return etcFile(daemon + ".stopped") }

// controlPlaneSteps starts what `kubeadm` would start as static pods.
func controlPlaneSteps(c Config) []step {
	pods, services := c.families(podCIDR4, podCIDR6), c.families(serviceCIDR4, serviceCIDR6)
	etcd := []string{
		"etcd", "--name=kube", "--data-dir=/var/lib/etcd", "--listen-client-urls=" + etcdURL, "--advertise-client-urls=" + etcdURL,
		"--listen-peer-urls=http://127.0.0.1:2380",
		"--unsafe-no-fsync", // what it holds dies with the cluster
	}
	server := []string{
		"kube-apiserver", "--etcd-servers=" + etcdURL, "--secure-port=6443",
		"--bind-address=" + controlPlane4.String(), "--advertise-address=" + controlPlane4.String(),
		"--service-cluster-ip-range=" + services, "--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction", "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP",
		"--client-ca-file=" + etcFile("ca.crt"),
		"--tls-cert-file=" + etcFile("apiserver.crt"), "--tls-private-key-file=" + etcFile("apiserver.key"),
		"--kubelet-client-certificate=" + etcFile("apiserver-kubelet-client.crt"), "--kubelet-client-key=" + etcFile("apiserver-kubelet-client.key"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + etcFile("sa.pub"), "--service-account-signing-key-file=" + etcFile("sa.key"),
		// The aggregation layer: a conformance test installs an API server of its own.
		"--requestheader-client-ca-file=" + etcFile("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-", "--requestheader-group-headers=X-Remote-Group", "--requestheader-username-headers=X-Remote-User",
		"--proxy-client-cert-file=" + etcFile("front-proxy-client.crt"), "--proxy-client-key-file=" + etcFile("front-proxy-client.key"),
		"--enable-aggregator-routing=true",
	}
	delegated := func(conf string) []string {
		path := etcFile(conf)
		return []string{
			"--kubeconfig=" + path, "--authentication-kubeconfig=" + path, "--authorization-kubeconfig=" + path,
			"--bind-address=127.0.0.1", "--leader-elect=false",
		}
	}
	controllers := append([]string{"kube-controller-manager"}, delegated("controller-manager.conf")...)
	controllers = append(controllers,
		"--allocate-node-cidrs=true", "--cluster-cidr="+pods, "--service-cluster-ip-range="+services,
		"--use-service-account-credentials=true", "--root-ca-file="+etcFile("ca.crt"),
		"--service-account-private-key-file="+etcFile("sa.key"),
		"--cluster-signing-cert-file="+etcFile("ca.crt"), "--cluster-signing-key-file="+etcFile("ca.key"),
	)
	scheduler := append([]string{"kube-scheduler"}, delegated("scheduler.conf")...)
	ready := etcFile(apiReady)
	return []step{
		{Name: "etcd", Args: etcd, Daemon: true},
		{Name: "kube-apiserver", Args: server, Daemon: true},
		{Name: "kube-controller-manager", Args: controllers, Wait: ready, Daemon: true},
		{Name: "kube-scheduler", Args: scheduler, Wait: ready, Daemon: true},
	}
}

// nodeSteps starts a node; archives are imported before pods can ask for them.
func nodeSteps(c Config, node string, archives []string) []step {
	steps := []step{{Name: "containerd", Args: []string{"containerd", "--config", etcFile("containerd.toml")}, Daemon: true}}
	for _, archive := range archives {
		name := "import-" + strings.TrimSuffix(filepath.Base(archive), ".tar")
		steps = append(steps, step{Name: name, Wait: containerdSocket, Args: importCommand(archive)})
	}
	kubelet := []string{
		"kubelet", "--config=" + etcFile("kubelet.yaml"), "--kubeconfig=" + etcFile("kubelet.conf"), "--hostname-override=" + node,
		"--node-ip=" + c.families(address4(node).String(), address6(node).String()), "--v=2",
	}
	steps = append(steps, step{Name: "kubelet", Args: kubelet, Wait: etcFile(apiReady), Daemon: true})
	if c.Proxy != NoProxy {
		steps = append(steps, step{Name: "kube-proxy", Args: []string{"kube-proxy", "--config=" + etcFile("kube-proxy.yaml"), "--v=2"}, Wait: etcFile(nodeKnown), Daemon: true})
	}
	return steps
}

// importCommand imports an archive into containerd's namespace of Kubernetes; "-" is standard input.
func importCommand(archive string) []string {
	return []string{"ctr", "-n", "k8s.io", "images", "import", archive}
}

// nodeFiles are the files of a node's /etc/kubernetes that are no certificates.
func nodeFiles(c Config, node string) map[string]string {
	return map[string]string{
		"containerd.toml": containerdConfig,
		"kubelet.yaml":    kubeletConfig(node),
		"kube-proxy.yaml": proxyConfig(c, node),
		// Nobody listens there, so that a lookup outside of the cluster fails
		// slowly, as on a machine without a network, and not wrongly.
		"resolv.conf": "nameserver 192.0.2.53\n",
	}
}

// restrict_oom_score_adj: without CAP_SYS_RESOURCE a pod may not be given a
// lower score than containerd's own.
const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "` + containerdSocket + `"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + pauseImage + `"
  disable_apparmor = true
  restrict_oom_score_adj = true
  enable_unprivileged_ports = true
  enable_unprivileged_icmp = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
`

// Images are never collected: nothing could fetch them again. A full disk of
// the machine around us is not the node's to act on.
func kubeletConfig(node string) string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %s
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: %s}
authorization: {mode: Webhook}
tlsCertFile: %s
tlsPrivateKeyFile: %s
healthzBindAddress: 127.0.0.1
containerRuntimeEndpoint: unix://%s
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
clusterDNS: [%s]
clusterDomain: cluster.local
resolvConf: %s
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {imagefs.available: "0%%", nodefs.available: "0%%", nodefs.inodesFree: "0%%", memory.available: 50Mi}
maxPods: 110
nodeStatusUpdateFrequency: 4s
syncFrequency: 20s
fileCheckFrequency: 5s
volumePluginDir: /var/lib/kubelet/volumeplugins
`, address4(node), etcFile("ca.crt"), etcFile("kubelet.crt"), etcFile("kubelet.key"), containerdSocket, dnsIP, etcFile("resolv.conf"))
}

// nf_conntrack_max cannot be set in a network namespace: 0 leaves it alone.
func proxyConfig(c Config, node string) string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: %s}
mode: %s
clusterCIDR: %s
hostnameOverride: %s
oomScoreAdj: 0
conntrack: {maxPerCore: 0, min: 0}
`, etcFile("kube-proxy.conf"), c.Proxy, c.families(podCIDR4, podCIDR6), node)
}

// bridgeConfig is the CNI configuration of a node under BridgeCNI.
func bridgeConfig(cidrs []string) string {
	ranges, routes := make([]string, len(cidrs)), make([]string, len(cidrs))
	for i, cidr := range cidrs {
		ranges[i] = fmt.Sprintf(`[{"subnet": %q}]`, cidr)
		routes[i] = `{"dst": "0.0.0.0/0"}`
		if strings.Contains(cidr, ":") {
			routes[i] = `{"dst": "::/0"}`
		}
	}
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "bridge", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [%s], "routes": [%s]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
`, strings.Join(ranges, ", "), strings.Join(routes, ", "))
}
