{{/* Names. */}}
{{- define "triptych.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Selector labels: (dict "root" $ "component" "encoder" "pool" "…"). */}}
{{- define "triptych.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
triptych/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "triptych.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: triptych
{{ include "triptych.selector" . }}
{{- with .modality }}
triptych/modality: {{ . }}
{{- end }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "triptych.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "triptych.redisImage" -}}
{{- if .Values.redis.digest -}}
{{- printf "%s@%s" .Values.redis.image .Values.redis.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.redis.image .Values.redis.tag -}}
{{- end -}}
{{- end -}}

{{- define "triptych.serviceAccountName" -}}
{{- default (printf "%s-proxy" (include "triptych.fullname" .)) .Values.serviceAccount.name -}}
{{- end -}}

{{/* The wildcard address of the IP family. */}}
{{- define "triptych.everywhere" -}}
{{- ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{- define "triptych.serverName" -}}
{{- default (printf "%s.%s.svc" (include "triptych.fullname" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end -}}

{{- define "triptych.tlsSecret" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{- required "tls.mode is secret: name it in tls.existingSecret" .Values.tls.existingSecret -}}
{{- else -}}
{{- printf "%s-parts" (include "triptych.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* "yes" if there is a pool of a role that runs our workers: (dict "root" $ "role" "encoder"). */}}
{{- define "triptych.hasRole" -}}
{{- $role := .role -}}
{{- range .root.Values.pools }}{{ if and (eq .role $role) (ne (include "triptych.isVllm" .) "yes") }}yes{{ end }}{{ end -}}
{{- end -}}

{{/* "yes" for a pool whose pods run vLLM. */}}
{{- define "triptych.isVllm" -}}
{{- if kindIs "string" .engine }}yes{{ end -}}
{{- end -}}

{{/* Component of a pool's pods. */}}
{{- define "triptych.component" -}}
{{- if include "triptych.isVllm" . }}vllm{{ else }}{{ .role }}{{ end -}}
{{- end -}}

{{/* "yes" if there is a pool with vLLM. */}}
{{- define "triptych.hasVllm" -}}
{{- range .Values.pools }}{{ include "triptych.isVllm" . }}{{ end -}}
{{- end -}}

{{/* Workers of a role for a proxy: our own by the slices of their Service, vLLM's by the addresses of each pool's. */}}
{{- define "triptych.workers" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $full := include "triptych.fullname" $root -}}
{{- $found := list -}}
{{- if include "triptych.hasRole" . }}{{ $found = append $found (printf "k8s:%s/%s-%s:grpc" $root.Release.Namespace $full $role) }}{{ end -}}
{{- range $given := $root.Values.pools }}
{{- if and (eq $given.role $role) (include "triptych.isVllm" $given) }}
{{- $found = append $found (printf "vllm+dns:%s-%s.%s.svc:8000" $full $given.name $root.Release.Namespace) -}}
{{- end }}
{{- end }}
{{- join "," $found -}}
{{- end -}}

{{/* A pool with defaults, as YAML. `model` is the pool's own. */}}
{{- define "triptych.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.poolDefaults) .pool | toYaml -}}
{{- end -}}

{{/* Grace period in seconds: preStop sleep, lame duck, drain, and a margin. */}}
{{- define "triptych.graceSeconds" -}}
{{- add .preStopSeconds (div (add .lameDuckMs 999) 1000) .graceSeconds 5 -}}
{{- end -}}

{{/* The chart's own store of encoder outputs: "store", "redis", or empty. */}}
{{- define "triptych.ownStore" -}}
{{- if or .Values.ec.existingSecret .Values.ec.tiers -}}
{{- else if .Values.redis.enabled -}}redis
{{- else if .Values.store.enabled -}}store
{{- else -}}
{{- fail "there is no store for encoder outputs: set ec.existingSecret, ec.tiers, redis.enabled or store.enabled" -}}
{{- end -}}
{{- end -}}

{{/* Variables of the encoder output store; `slab`, a path and a size, is the first tier. */}}
{{- define "triptych.ecEnv" -}}
{{- $values := .root.Values -}}
{{- $name := include "triptych.fullname" .root -}}
{{- $own := include "triptych.ownStore" .root -}}
{{- if $values.ec.existingSecret }}
- name: EC_STORE
  valueFrom:
    secretKeyRef: {name: {{ $values.ec.existingSecret }}, key: {{ $values.ec.key }}}
{{- else if $values.ec.tiers }}
- name: EC_STORE
  value: {{ join " " $values.ec.tiers | quote }}
{{- else if eq $own "redis" }}
{{- with $values.redis.existingSecret }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $values.redis.key }}}
{{- end }}
- name: EC_STORE
  value: redis://{{ if $values.redis.existingSecret }}:$(REDIS_PASSWORD)@{{ end }}{{ $name }}-redis:6379
{{- else }}
- name: EC_STORE
  value: grpc://{{ $name }}-store:7400
{{- end }}
- name: TRIPTYCH_EC
  value: {{ printf "%s$(EC_STORE)" (ternary (printf "%s " .slab) "" (ne .slab "")) | quote }}
{{- end -}}

{{/* Variables of every process: (dict "root" $ "component" "…" "drain" …). */}}
{{- define "triptych.env" -}}
{{- $values := .root.Values -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: TRIPTYCH_ADMIN
  value: "{{ include "triptych.everywhere" .root }}:9090"
{{- if $values.config }}
- name: TRIPTYCH_CONFIG
  value: /etc/triptych/triptych.toml
{{- end }}
- name: TRIPTYCH_LAME_DUCK
  value: {{ int .drain.lameDuckMs | quote }}
- name: TRIPTYCH_DRAIN_GRACE
  value: {{ int .drain.graceSeconds | quote }}
- name: TRIPTYCH_LOG
  value: {{ $values.log.filter | quote }}
- name: TRIPTYCH_LOG_JSON
  value: {{ $values.log.json | quote }}
{{- with $values.otel.endpoint }}
- name: TRIPTYCH_OTLP
  value: {{ . | quote }}
- name: OTEL_TRACES_SAMPLER
  value: {{ $values.otel.sampler | quote }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $values.otel.samplerArg | quote }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $.root.Release.Namespace }},k8s.pod.name=$(POD_NAME){{ range $k, $v := $values.otel.resourceAttributes }},{{ $k }}={{ $v }}{{ end }}
{{- end }}
{{- if ne $values.tls.mode "none" }}
- name: TRIPTYCH_TLS_CERT
  value: /tls/tls.crt
- name: TRIPTYCH_TLS_KEY
  value: /tls/tls.key
- name: TRIPTYCH_TLS_CA
  value: /tls/ca.crt
- name: TRIPTYCH_TLS_SERVER_NAME
  value: {{ include "triptych.serverName" .root }}
{{- else if ne .component "proxy" }}
- name: TRIPTYCH_INSECURE_PLAINTEXT
  value: "true"
{{- end }}
{{- end -}}

{{/* Probes of a worker or store. The kubelet has no client certificate, so with TLS they use HTTP. */}}
{{- define "triptych.workerProbes" -}}
{{- $tries := max 1 (div .startupSeconds 2) -}}
{{- if eq .root.Values.tls.mode "none" }}
startupProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ $tries }}
readinessProbe:
  grpc: {port: {{ .port }}, service: {{ .service }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
# A busy worker answers late. It is restarted only after a minute without an answer.
livenessProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- else }}
startupProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ $tries }}
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /healthz, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
{{- end -}}

{{- define "triptych.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "triptych.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "triptych.spread" -}}
{{- $labels := include "triptych.selector" . -}}
{{- range .root.Values.topologySpread }}
- topologyKey: {{ .topologyKey }}
  whenUnsatisfiable: {{ .whenUnsatisfiable }}
  maxSkew: {{ int .maxSkew }}
  matchLabelKeys: [pod-template-hash]
  labelSelector:
    matchLabels:
      {{- $labels | nindent 6 }}
{{- end }}
{{- end -}}
