{{/* Container settings of a pool's worker. Keys of `.`: root, pool (filled in), port, any, slab, model. */}}
{{- define "triptych.poolEnv" -}}
- name: TRIPTYCH_ID
  value: $(POD_NAME)
- name: TRIPTYCH_GRPC
  value: "{{ .any }}:{{ .port }}"
- name: TRIPTYCH_ADVERTISE
  value: "{{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq .root.Values.ipFamily "IPv6") }}:{{ .port }}"
{{- include "triptych.ecEnv" (dict "root" .root "slab" .slab) }}
- name: TRIPTYCH_MODEL
  value: {{ .model | quote }}
- name: TRIPTYCH_PRECISION
  value: {{ .pool.precision }}
{{- $cpu := dig "requests" "cpu" "" .pool.resources }}
- name: TRIPTYCH_THREADS
{{- if and $cpu (eq (int .pool.threads) 0) }}
  # The node may have more cores than this pod may use.
  valueFrom: {resourceFieldRef: {resource: requests.cpu}}
{{- else }}
  value: {{ int .pool.threads | quote }}
{{- end }}
- name: XDG_CACHE_HOME
  value: /cache
- name: TRIPTYCH_PACKED_MIB
  value: {{ int .root.Values.models.packedMib | quote }}
- name: HF_HOME
  value: /hub
{{- with .root.Values.ec.rows }}
- name: TRIPTYCH_EC_ROWS
  value: {{ . }}
{{- end }}
{{- if .root.Values.ec.macKeys.existingSecret }}
- name: TRIPTYCH_EC_MAC_KEYS
  value: /mac-keys/{{ .root.Values.ec.macKeys.key }}
{{- end }}
{{- if eq .pool.role "encoder" }}
- name: TRIPTYCH_MAX_JOBS
  value: {{ int .pool.maxJobs | quote }}
- name: TRIPTYCH_ROWS_MIB
  value: {{ int .pool.rowsMib | quote }}
- name: TRIPTYCH_MEMORY_MIB
  value: {{ int .pool.memoryMib | quote }}
{{- with .pool.towers }}
- name: TRIPTYCH_TOWERS
  value: {{ join "," . | quote }}
{{- end }}
{{- else }}
- name: TRIPTYCH_KV_MIB
  value: {{ int .pool.engine.kvMib | quote }}
- name: TRIPTYCH_CROSS_KV_MIB
  value: {{ int .pool.engine.crossKvMib | quote }}
- name: TRIPTYCH_HOST_KV_MIB
  value: {{ int .pool.engine.hostKvMib | quote }}
- name: TRIPTYCH_TOKEN_BUDGET
  value: {{ int .pool.engine.tokenBudget | quote }}
- name: TRIPTYCH_DECODE_SHARE
  value: {{ int .pool.engine.decodeShare | quote }}
- name: TRIPTYCH_TPOT_SLO
  value: {{ .pool.engine.tpotSloMs | quote }}
- name: TRIPTYCH_MAX_TPOT_SLO
  value: {{ .pool.engine.maxTpotSloMs | quote }}
- name: TRIPTYCH_STREAM_INTERVAL
  value: {{ int .pool.engine.streamIntervalMs | quote }}
- name: TRIPTYCH_MAX_SEQUENCES
  value: {{ int .pool.engine.maxSequences | quote }}
- name: TRIPTYCH_WITH_ENCODER
  value: {{ .pool.withEncoder | quote }}
{{- if .pool.withEncoder }}
- name: TRIPTYCH_ENCODER_WEIGHTS
  value: {{ .pool.encoderWeights }}
- name: TRIPTYCH_ENCODER_WEIGHTS_IDLE
  value: {{ int .pool.encoderWeightsIdleSeconds | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- define "triptych.poolMounts" -}}
- {name: cache, mountPath: /cache}
{{- if .root.Values.models.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .pool.model.hub }}
- {name: hub, mountPath: /hub}
{{- if .root.Values.models.hubToken.existingSecret }}
- {name: hub-token, mountPath: /hub/token, subPath: token, readOnly: true}
{{- end }}
{{- end }}
{{- if .root.Values.ec.macKeys.existingSecret }}
- {name: mac-keys, mountPath: /mac-keys, readOnly: true}
{{- end }}
{{- if .slab }}
- {name: slab, mountPath: /dev/shm}
{{- end }}
{{- end }}
{{- define "triptych.poolVolumes" -}}
- name: cache
  # Twice the packed weights and sample models: an old file is removed once the new one is complete.
  emptyDir: {sizeLimit: {{ add 1024 (mul 2 (int .root.Values.models.packedMib)) }}Mi}
{{- if .pool.model.hub }}
- name: hub
  emptyDir: {sizeLimit: {{ .root.Values.models.cacheSize }}}
{{- end }}
{{- if .root.Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .root.Values.models.existingClaim }}, readOnly: true}
{{- end }}
{{- if and .pool.model.hub .root.Values.models.hubToken.existingSecret }}
- name: hub-token
  secret:
    secretName: {{ .root.Values.models.hubToken.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .root.Values.models.hubToken.key }}, path: token}]
{{- end }}
{{- if .root.Values.ec.macKeys.existingSecret }}
- name: mac-keys
  secret: {secretName: {{ .root.Values.ec.macKeys.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- if .slab }}
# Pages of the slab, and its metadata.
- name: slab
  emptyDir: {medium: Memory, sizeLimit: {{ add 16 (int .pool.sharedMemoryMib) }}Mi}
{{- end }}
{{- end }}
