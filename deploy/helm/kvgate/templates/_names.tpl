{{- define "kvgate.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvgate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "kvgate.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvgate.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvgate.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvgate.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvgate.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kvgate.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvgate.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvgate.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvgate.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "kvgate.adminSecret" -}}
{{- .Values.admin.existingSecret | default (printf "%s-admin" (include "kvgate.fullname" .)) -}}
{{- end -}}

{{/* The settings of Kubernetes discovery, empty without. */}}
{{- define "kvgate.discovery" -}}
{{- $discovery := .Values.config.discovery | default dict -}}
{{- if $discovery.kubernetes -}}
{{- toYaml $discovery.kubernetes -}}
{{- end -}}
{{- end -}}

{{/* kvgate.yaml: the values' `config`, and what other values say of it. */}}
{{- define "kvgate.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $auth := $config.auth | default dict -}}
{{- if .Values.admin.open -}}
{{- $auth = set $auth "admin_open" true -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $auth = set $auth "keys_file" (printf "/etc/kvgate/keys/%s" .Values.apiKeys.key) -}}
{{- end -}}
{{- if $auth -}}
{{- $config = set $config "auth" $auth -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $tls := dict "cert" "/etc/kvgate/tls/tls.crt" "key" "/etc/kvgate/tls/tls.key" -}}
{{- $config = set $config "server" (set $config.server "tls" (merge $tls ($config.server.tls | default dict))) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Whole seconds from a setting that may be 30 or 30.5. */}}
{{- define "kvgate.graceSeconds" -}}
{{- add (.Values.config.server.drain_timeout_s | default 30 | float64 | ceil | int) (int .Values.preStopSeconds) 10 -}}
{{- end -}}
