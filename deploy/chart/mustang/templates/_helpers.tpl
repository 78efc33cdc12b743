{{- define "mustang.labels" -}}
app.kubernetes.io/name: mustang
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "mustang.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* The agent's YAML: the values as they are, and what the chart itself decides. Where mustang connects no pods
       it is told nothing of how. */ -}}
{{- define "mustang.config" -}}
{{- $own := dict "bpffs" (printf "%s/mustang" .Values.host.bpffs) "state-dir" .Values.host.run "api-server" .Values.apiServer -}}
{{- with include "mustang.cgroup" . }}{{ $own = set $own "cgroup-root" . }}{{ end -}}
{{- $agent := .Values.agent -}}
{{- if not (include "mustang.cni" .) }}{{ $agent = omit $agent "cni" }}{{ end -}}
{{- if and (dig "cni" "ipam" "pools" "" $agent) (not (index .Values.nodeSelector "kubernetes.io/hostname")) }}
{{- fail "agent.cni.ipam.pools would be those of all nodes, and each would give out the same addresses: leave agent.cni.ipam out, and pods get addresses of their Node's podCIDRs; or, for one node alone, name it by nodeSelector kubernetes.io/hostname" }}
{{- end -}}
{{- toYaml (merge $own $agent) }}
{{- end }}

{{- /* The root of the node's cgroups, for Services at sockets; empty: as the agent finds it. What is mounted elsewhere
       is where it looks. */ -}}
{{- define "mustang.cgroup" -}}
{{- $mounted := ternary "" .Values.host.cgroup (eq .Values.host.cgroup "/sys/fs/cgroup") -}}
{{- index .Values.agent "cgroup-root" | default $mounted }}
{{- end }}

{{- /* The port of a listen address; empty for none. */ -}}
{{- define "mustang.port" -}}
{{- if ne . "none" }}{{ regexFind "[0-9]+$" . }}{{ end -}}
{{- end }}

{{- /* Where a listen address is asked from its own node: one that means all of them, at the loopback's. */ -}}
{{- define "mustang.host" -}}
{{- $host := regexReplaceAll ":[0-9]+$" . "" | trimPrefix "[" | trimSuffix "]" -}}
{{- if regexMatch "^[0.:]+$" $host }}127.0.0.1{{ else }}{{ $host }}{{ end -}}
{{- end }}

{{- /* "yes" where mustang connects pods; else empty: plugin and list are none of its business. */ -}}
{{- define "mustang.cni" -}}
{{- if ne (index .Values.agent "cni-conf-dir" | default "none") "none" }}yes{{ end -}}
{{- end }}

{{- /* What confines a container that works on the node, beside its capabilities. */ -}}
{{- define "mustang.confinement" -}}
{{- toYaml (dict "appArmorProfile" .Values.appArmorProfile "seLinuxOptions" .Values.seLinuxOptions) }}
{{- end }}
