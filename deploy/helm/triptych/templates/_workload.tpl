{{/*
A Deployment of one of our processes. Of `.`:
  root component pool modality name     whose it is
  replicas                              nothing: something else scales it
  args env envFrom ports probes         of the container; env, envFrom, ports and probes are YAML
  mounts volumes                        YAML, beside those that all have
  settings                              resources, drain, scheduling: the pool, proxy or store of the values
  serviceAccount automount
*/}}
{{- define "triptych.workload" -}}
{{- $values := .root.Values -}}
{{- $s := .settings -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "triptych.labels" . | nindent 4 }}
spec:
  {{- if .replicas }}
  replicas: {{ int .replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  # Loading a model takes a while; a rollout without progress for this long is reported as failed.
  progressDeadlineSeconds: {{ add 600 (default 0 $s.startupSeconds) }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  selector:
    matchLabels:
      {{- include "triptych.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "triptych.labels" . | nindent 8 }}
      {{- $config := ternary (dict "triptych/config" (sha256sum $values.config)) (dict) (ne $values.config "") }}
      {{- with merge (dict) (default (dict) $s.podAnnotations) $values.podAnnotations $config }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ .serviceAccount }}
      automountServiceAccountToken: {{ .automount }}
      enableServiceLinks: false
      {{- with $values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      terminationGracePeriodSeconds: {{ include "triptych.graceSeconds" $s.drain }}
      securityContext:
        {{- include "triptych.podSecurity" 65532 | nindent 8 }}
      {{- with (default (dict) $s.gpu).runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with $s.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $s.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $s.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $s.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "triptych.spread" . }}
      topologySpreadConstraints:
        {{- . | trim | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .component }}
          image: {{ include "triptych.image" .root }}
          imagePullPolicy: {{ $values.image.pullPolicy }}
          args:
            {{- toYaml (concat (list .component) (default (list) $s.args)) | nindent 12 }}
          env:
            {{- include "triptych.env" (dict "root" .root "component" .component "drain" $s.drain) | nindent 12 }}
            {{- .env | trim | nindent 12 }}
            {{- if and $s.gpu $s.gpu.count }}
            # A pod that has a GPU and cannot use it says so, and does not compute on the CPU.
            - {name: TRIPTYCH_DEVICE, value: cuda}
            {{- end }}
            {{- range $name, $value := $s.env }}
            - name: {{ $name }}
              value: {{ $value | quote }}
            {{- end }}
          {{- with .envFrom }}
          envFrom:
            {{- . | trim | nindent 12 }}
          {{- end }}
          ports:
            {{- .ports | trim | nindent 12 }}
            - {name: admin, containerPort: 9090}
          {{- .probes | trim | nindent 10 }}
          {{- if $s.drain.preStopSeconds }}
          # Endpoints are removed before the process gets its signal.
          lifecycle:
            preStop:
              sleep: {seconds: {{ int $s.drain.preStopSeconds }}}
          {{- end }}
          resources:
            {{- include "triptych.resources" $s | nindent 12 }}
          securityContext:
            {{- include "triptych.containerSecurity" . | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            {{- if ne $values.tls.mode "none" }}
            - {name: tls, mountPath: /tls, readOnly: true}
            {{- end }}
            {{- if $values.config }}
            - {name: config, mountPath: /etc/triptych, readOnly: true}
            {{- end }}
            {{- with .mounts }}
            {{- . | trim | nindent 12 }}
            {{- end }}
      volumes:
        - name: tmp
          emptyDir: {sizeLimit: 1Gi}
        {{- if ne $values.tls.mode "none" }}
        - name: tls
          secret: {secretName: {{ include "triptych.tlsSecret" .root }}, defaultMode: 0440}
        {{- end }}
        {{- if $values.config }}
        - name: config
          configMap: {name: {{ include "triptych.fullname" .root }}-config}
        {{- end }}
        {{- with .volumes }}
        {{- . | trim | nindent 8 }}
        {{- end }}
{{- end -}}

{{/* Resources with the GPUs of a pool among the limits. */}}
{{- define "triptych.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- with .gpu }}
{{- if .count }}
{{- $_ := set $resources "limits" (merge (dict .resource (int .count)) (default (dict) $resources.limits)) -}}
{{- end }}
{{- end }}
{{- toYaml $resources -}}
{{- end -}}

{{- define "triptych.pdb" -}}
{{- if .settings.pdb.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "triptych.labels" . | nindent 4 }}
spec:
  # A percentage, so that a node can be drained with few pods too.
  maxUnavailable: {{ .settings.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "triptych.selector" . | nindent 6 }}
{{- end }}
{{- end -}}
