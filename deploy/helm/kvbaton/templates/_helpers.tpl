{{- define "kvbaton.name" -}}
{{- if contains "kvbaton" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvbaton" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvbaton.selector" -}}
app.kubernetes.io/name: kvbaton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvbaton.secret" -}}
{{- if .Values.secrets.existingSecret }}{{ .Values.secrets.existingSecret }}{{ else }}{{ include "kvbaton.name" . }}-keys{{ end }}
{{- end }}

{{/* Secrets are passed in the environment: any process can read a command line. */}}
{{- define "kvbaton.keys" -}}
- name: KVBATON_CLUSTER_KEY
  valueFrom: {secretKeyRef: {name: {{ include "kvbaton.secret" . }}, key: clusterKey}}
- name: KVBATON_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "kvbaton.secret" . }}, key: apiKeys, optional: true}}
- name: KVBATON_OPERATOR_KEY
  valueFrom: {secretKeyRef: {name: {{ include "kvbaton.secret" . }}, key: operatorKeys, optional: true}}
{{- end }}

{{- define "kvbaton.scheme" -}}
{{- ternary "https" "http" (ne .Values.tls.secret "") }}
{{- end }}

{{- define "kvbaton.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- end }}

{{/* Placement of the pods of one kind. */}}
{{- define "kvbaton.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}
