{{- define "ranvier.name" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "ranvier.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ranvier.labels" -}}
{{ include "ranvier.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "ranvier.account" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create }}{{ include "ranvier.name" . }}
{{- else }}default
{{- end }}
{{- end }}

{{- define "ranvier.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "ranvier.secret" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" (include "ranvier.name" .)) }}
{{- end }}

{{/* Keys that are mounted, as a map of what each is for -> the name of its entry in the Secret. */}}
{{- define "ranvier.keys" -}}
{{- $fixed := dict "cluster" "cluster-key" "control" "control-key" "controlKeys" "control-keys.toml" "clients" "keys.toml" "engines" "engine-key" "admin" "admin-key" }}
{{- $used := dict }}
{{- range $for, $entry := $fixed }}
{{- if $.Values.keys.existingSecret }}
{{- with index $.Values.keys.entries $for }}{{ $_ := set $used $for . }}{{ end }}
{{- else if index $.Values.keys.made $for }}{{ $_ := set $used $for $entry }}
{{- end }}
{{- end }}
{{- range $for := list "cluster" "control" }}
{{- if not (hasKey $used $for) }}
{{- fail (printf "the %s key is missing: name a Secret by keys.existingSecret, or give --set-file keys.made.%s=FILE" $for $for) }}
{{- end }}
{{- end }}
{{- toJson $used }}
{{- end }}

{{/* A value as TOML on one line: a JSON value is one, but for tables. */}}
{{- define "ranvier.toml" -}}
{{- if kindIs "map" . }}{ {{- range $at, $name := keys . | sortAlpha }}{{ if $at }}, {{ end }}{{ toRawJson $name }} = {{ include "ranvier.toml" (index $ $name) }}{{ end -}} }
{{- else if kindIs "slice" . }}[{{ range $at, $each := . }}{{ if $at }}, {{ end }}{{ include "ranvier.toml" $each }}{{ end }}]
{{- else }}{{ toRawJson . }}
{{- end }}
{{- end }}

{{/* A source of engines as the text of backend_kubernetes. */}}
{{- define "ranvier.source" -}}
{{- if .service }}service={{ .service }}
{{- else if .pool }}pool={{ .pool }}
{{- else }}pods={{ range $at, $label := keys .pods | sortAlpha }}{{ if $at }}&{{ end }}{{ $label }}={{ index $.pods $label }}{{ end }}
{{- end }}
{{- range $name := list "port" "namespace" "scheme" "family" }}
{{- with index $ $name }},{{ $name }}={{ . }}{{ end }}
{{- end }}
{{- range $name := keys (.options | default dict) | sortAlpha }},{{ $name }}={{ index $.options $name }}{{ end }}
{{- end }}
