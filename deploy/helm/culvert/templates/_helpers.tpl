{{- define "culvert.metadata" -}}
name: culvert
namespace: {{ .Release.Namespace }}
labels:
  app.kubernetes.io/name: culvert
{{- end }}
