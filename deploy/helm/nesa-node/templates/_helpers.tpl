{{- define "nesa.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of one part: (dict "root" $ "part" "nodes"). */}}
{{- define "nesa.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "nesa.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: nesa-node
{{ include "nesa.selector" . }}
{{- end -}}

{{- define "nesa.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* The name of a secret: (dict "root" $ "of" .Values.swarmKey "name" "swarm-key"). */}}
{{- define "nesa.secretName" -}}
{{- .of.existingSecret | default (printf "%s-%s" (include "nesa.fullname" .root) .name) -}}
{{- end -}}

{{/* An environment variable out of a secret, if there is one. */}}
{{- define "nesa.secretEnv" -}}
{{- if or .of.existingSecret .of.value }}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ include "nesa.secretName" . }}
      key: {{ .name }}
{{- end }}
{{- end -}}

{{- define "nesa.initialPeers" -}}
{{- $peers := .Values.initialPeers -}}
{{- if .Values.bootstrap.enabled -}}
{{- $id := required "bootstrap.peerId is needed: `nesa-node identity` prints it" .Values.bootstrap.peerId -}}
{{- $peers = prepend $peers (printf "/dns4/%s-bootstrap/tcp/%v/p2p/%s" (include "nesa.fullname" .) .Values.bootstrap.port $id) -}}
{{- end -}}
{{- required "give initialPeers, or enable bootstrap" (join " " $peers) -}}
{{- end -}}

{{/* What every pod's container is told, whichever part it is. */}}
{{- define "nesa.commonEnv" -}}
- {name: NESA_LOG_FORMAT, value: json}
{{- if .Values.metrics.enabled }}
- {name: NESA_METRICS, value: "0.0.0.0:{{ .Values.metrics.port }}"}
- {name: NESA_METRICS_BEYOND_LOOPBACK, value: "true"}
{{- end }}
{{- include "nesa.secretEnv" (dict "root" . "of" .Values.swarmKey "name" "swarm-key" "variable" "NESA_SWARM_KEY") }}
{{- end -}}

{{- define "nesa.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "nesa.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "nesa.ready" -}}
exec: {command: [test, -e, /tmp/nesa-node.ready]}
{{- end -}}

{{/* Names of the gateway's own pages, where a proxy changes `Host`: those of its service, and the ingress'. */}}
{{- define "nesa.hostNames" -}}
{{- $service := printf "%s-gateway" (include "nesa.fullname" .) -}}
{{- $names := list $service (printf "%s.%s" $service .Release.Namespace) (printf "%s.%s.svc" $service .Release.Namespace) (printf "%s.%s.svc.%s" $service .Release.Namespace .Values.clusterDomain) -}}
{{- if .Values.gateway.ingress.enabled -}}
{{- $names = append $names .Values.gateway.ingress.host -}}
{{- end -}}
{{- join " " $names -}}
{{- end -}}
