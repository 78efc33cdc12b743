// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"fmt"
	"strings"

	"github.com/mustang-net/mustang/test/kube"
)

// This file writes the objects that several tests have.

// deployment has pods labelled app=name. spec is theirs, its lines not indented.
func deployment(name string, replicas int, spec string) string {
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
%[3]s---`, name, replicas, indent(6, spec))
}

// indent moves lines to the right.
func indent(columns int, text string) string {
	by := strings.Repeat(" ", columns)
	return by + strings.ReplaceAll(strings.Trim(text, "\n"), "\n", "\n"+by) + "\n"
}

// idleClients is a pod on each node that commands are run in.
const idleClients = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: client}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: client, image: "` + kube.AgnhostImage + `", imagePullPolicy: Never, args: [pause]}]
`

// webServer is the spec of pods that are spread over the nodes and answer with
// their names: seconds that a pod has to end, what happens where they cannot be
// spread, a further argument, the probe's path.
func webServer(seconds int, unspread, argument, probe string) string {
	return fmt.Sprintf(`
terminationGracePeriodSeconds: %d
topologySpreadConstraints:
- {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: %s, labelSelector: {matchLabels: {app: web}}}
containers:
- name: web
  image: %s
  imagePullPolicy: Never
  args: [netexec, --http-port=8080%s]
  readinessProbe: {httpGet: {path: %s, port: 8080}, periodSeconds: 1}
`, seconds, unspread, kube.AgnhostImage, argument, probe)
}
