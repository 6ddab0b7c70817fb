{{/* The common name of the release's objects: the release's name, with "baton" in it once. */}}
{{- define "baton.name" -}}
{{- $name := contains "baton" .Release.Name | ternary .Release.Name (printf "%s-baton" .Release.Name) -}}
{{- printf "%s-operator" ($name | trunc 54 | trimSuffix "-") -}}
{{- end }}

{{/* Never change these: Kubernetes refuses another selector. The pools' NetworkPolicies select by the first. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The full name of an image of ours: (list $ NAME). A tag or digest in the name wins over images.tag. */}}
{{- define "baton.image" -}}
{{- $images := (index . 0).Values.images -}}
{{- $name := index . 1 -}}
{{- if not (regexMatch "[:@][^/]*$" $name) -}}
{{- $name = printf "%s:%s" $name ($images.tag | default (index . 0).Chart.AppVersion) -}}
{{- end -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $name -}}
{{- end }}
