{{/*
What is measured, for each target of `autoscaling`: name of the value, metric, selector of its own labels, what one unit
of the target is, and how to add up the series of a pod. One table, for both kinds of scaler.
*/}}
{{- define "triptych.signals" -}}
queuedTokens:
  metric: triptych_encode_queued_tokens
  unit: "1"
backlogMs:
  metric: triptych_encode_backlog_seconds
  unit: m
runningRequests:
  metric: triptych_requests_running
  unit: "1"
waitingRequests:
  metric: triptych_requests_waiting
  unit: "1"
kvUsePercent:
  metric: triptych_kv_cache_usage_ratio
  labels: {pool: self}
  unit: percent
{{- end -}}

{{/* An integer value as a quantity: (dict "unit" "percent" "value" 80) is 800m. */}}
{{- define "triptych.quantity" -}}
{{- if eq .unit "percent" }}{{ mul 10 (int .value) }}m{{ else if eq .unit "m" }}{{ int .value }}m{{ else }}{{ int .value }}{{ end -}}
{{- end -}}

{{/* The same as a decimal number, for Prometheus. */}}
{{- define "triptych.number" -}}
{{- if eq .unit "percent" }}{{ divf (int .value) 100 }}{{ else if eq .unit "m" }}{{ divf (int .value) 1000 }}{{ else }}{{ int .value }}{{ end -}}
{{- end -}}

{{/* The autoscaler of a Deployment. Keys of `.`: as in triptych.workload. */}}
{{- define "triptych.scaler" -}}
{{- $a := .settings.autoscaling -}}
{{- $signals := include "triptych.signals" . | fromYaml -}}
{{- $used := list -}}
{{- range $key := keys $signals | sortAlpha }}
{{- if gt (int (get $a $key)) 0 }}{{ $used = append $used $key }}{{ end }}
{{- end }}
{{- $cpu := int (default 0 $a.cpuPercent) -}}
{{- if and (ne $a.kind "none") (not $used) (eq $cpu 0) }}
{{- fail (printf "%s: autoscaling.kind is %s and there is no target; set one of queuedTokens, backlogMs, runningRequests, waitingRequests, kvUsePercent, cpuPercent" .name $a.kind) }}
{{- end }}
{{- if gt (int $a.minReplicas) (int $a.maxReplicas) }}
{{- fail (printf "%s: autoscaling.minReplicas %d is over maxReplicas %d" .name (int $a.minReplicas) (int $a.maxReplicas)) }}
{{- end }}
{{- if eq $a.kind "hpa" }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "triptych.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .name }}}
  minReplicas: {{ int $a.minReplicas }}
  maxReplicas: {{ int $a.maxReplicas }}
  behavior:
    {{- include "triptych.behavior" $a | nindent 4 }}
  metrics:
    {{- range $key := $used }}
    {{- $signal := get $signals $key }}
    - type: Pods
      pods:
        metric:
          name: {{ $signal.metric }}
          {{- with $signal.labels }}
          selector:
            matchLabels:
              {{- toYaml . | nindent 14 }}
          {{- end }}
        target:
          type: AverageValue
          averageValue: {{ include "triptych.quantity" (dict "unit" $signal.unit "value" (get $a $key)) | quote }}
    {{- end }}
    {{- if $cpu }}
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ $cpu }}}
    {{- end }}
{{- else if eq $a.kind "keda" }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "triptych.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .name }}}
  pollingInterval: 15
  minReplicaCount: {{ int $a.minReplicas }}
  maxReplicaCount: {{ int $a.maxReplicas }}
  # No fallback: while Prometheus is unavailable the number of pods stays as it is.
  advanced:
    horizontalPodAutoscalerConfig:
      name: {{ .name }}
      behavior:
        {{- include "triptych.behavior" $a | nindent 8 }}
  triggers:
    {{- $where := printf "namespace=%q,release=%q,component=%q" .root.Release.Namespace .root.Release.Name .component }}
    {{- with .pool }}{{ $where = printf "%s,worker_pool=%q" $where . }}{{ end }}
    {{- $address := .root.Values.monitoring.keda.serverAddress }}
    {{- range $key := $used }}
    {{- $signal := get $signals $key }}
    {{- $own := "" }}
    {{- range $label, $value := $signal.labels }}{{ $own = printf "%s,%s=%q" $own $label $value }}{{ end }}
    - type: prometheus
      name: {{ kebabcase $key }}
      metricType: AverageValue
      metadata:
        serverAddress: {{ $address }}
        # Sum over the pool: the scaler divides by the target. No data counts as no load.
        query: sum({{ $signal.metric }}{{ "{" }}{{ $where }}{{ $own }}{{ "}" }}) or vector(0)
        threshold: {{ include "triptych.number" (dict "unit" $signal.unit "value" (get $a $key)) | quote }}
    {{- end }}
    {{- if $cpu }}
    - type: cpu
      metricType: Utilization
      metadata: {value: {{ $cpu | quote }}}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Scale up at once, at most doubling; scale down slowly, since a removed pod loses its caches. */}}
{{- define "triptych.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: 30}
    - {type: Pods, value: 2, periodSeconds: 30}
  selectPolicy: Max
scaleDown:
  stabilizationWindowSeconds: {{ int .scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
