{{/* `--ec-transfer-config` of a pod with vLLM: (dict "root" $ "pool" $pool). The kubelet fills in the store's setting. */}}
{{- define "triptych.vllmTransfer" -}}
{{- $v := .pool.vllm -}}
{{- /* Of an encoder: it publishes for PD workers of ours, of families that it refuses to start with otherwise. */ -}}
{{- $ours := include "triptych.hasRole" (dict "root" .root "role" "pd") -}}
{{- $accepts := or (ne .pool.role "encoder") (ne $ours "") -}}
{{- $extra := dict "store" "$(EC_STORE)" "accept_proxy_keys" $accepts "patience_s" (int $v.patienceSeconds) -}}
{{- with $v.fingerprints }}{{ $_ := set $extra "proxy_fingerprints" . }}{{ end -}}
{{- $role := ternary "ec_producer" "ec_consumer" (eq .pool.role "encoder") -}}
{{- $transfer := dict "ec_connector" "TriptychECConnector" "ec_connector_module_path" "triptych_ec.vllm_connector" -}}
{{- merge $transfer (dict "ec_role" $role "ec_connector_extra_config" $extra) | toJson -}}
{{- end -}}

{{- define "triptych.vllmImage" -}}
{{- $image := .vllm.image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ $image.tag }}{{ end -}}
{{- end -}}

{{/* What a pool with vLLM cannot be. */}}
{{- define "triptych.vllmChecked" -}}
{{- $pool := .pool -}}
{{- if ne .root.Values.tls.mode "none" }}
{{- fail (printf "pool %s: engine vllm needs tls.mode none: the proxies reach it over HTTP, which the network policy keeps to them" $pool.name) }}
{{- end }}
{{- if $pool.model.sample }}
{{- fail (printf "pool %s: engine vllm needs model.hub or model.path: it has no sample models" $pool.name) }}
{{- end }}
{{- if ne $pool.autoscaling.kind "none" }}
{{- fail (printf "pool %s: engine vllm needs autoscaling.kind none: its pods have other metrics than those that the chart scales by" $pool.name) }}
{{- end }}
{{- if gt (len .root.Values.ec.tiers) 1 }}
{{- fail (printf "pool %s: engine vllm reads one store, ec.tiers has %d" $pool.name (len .root.Values.ec.tiers)) }}
{{- end }}
{{- end -}}

{{/* Variables of a pod with vLLM. */}}
{{- define "triptych.vllmEnv" -}}
{{- include "triptych.ecEnv" (dict "root" .root "slab" "") | trim }}
{{- if .root.Values.ec.macKeys.existingSecret }}
- name: TRIPTYCH_EC_MAC_KEYS
  value: /mac-keys/{{ .root.Values.ec.macKeys.key }}
{{- end }}
# The user has no entry in the image's list of users, and no home.
- {name: HOME, value: /cache}
- {name: USER, value: vllm}
- {name: VLLM_CACHE_ROOT, value: /cache/vllm}
- {name: HF_HOME, value: /hub}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
{{- with .root.Values.otel.endpoint }}
- name: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- range $name, $value := .pool.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Flags of `vllm serve`. */}}
{{- define "triptych.vllmArgs" -}}
{{- $pool := .pool -}}
{{- $model := $pool.model -}}
{{- $path := ternary (default "" $model.hub) (printf "/models/%s" (default "" $model.path)) (ne (default "" $model.hub) "") -}}
{{- $name := default (default (default "" $model.path | base) $model.hub) $model.name -}}
{{- $args := list "serve" $path "--host" (include "triptych.everywhere" .root | trimAll "[]") "--port" "8000" "--served-model-name" $name -}}
{{- $args = concat $args (list "--enable-mm-embeds" "--shutdown-timeout" (toString (int $pool.drain.graceSeconds))) -}}
{{- $args = concat $args (list "--ec-transfer-config" (include "triptych.vllmTransfer" .)) -}}
{{- with .root.Values.otel.endpoint }}{{ $args = concat $args (list "--otlp-traces-endpoint" .) }}{{ end -}}
{{- concat $args $pool.vllm.args | toYaml -}}
{{- end -}}
