{{/* Names, labels, and what routers and workers share. */}}

{{- define "warmfront.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "warmfront.fullname" -}}
{{- $name := include "warmfront.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects pods. It never changes from one version of the chart to the next. Takes {root, component}. */}}
{{- define "warmfront.selector" -}}
app.kubernetes.io/name: {{ include "warmfront.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of an object. The chart's own win over those of the user. Takes {root, component, labels}. */}}
{{- define "warmfront.labels" -}}
{{- $own := include "warmfront.selector" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "warmfront" -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) -}}
{{- toYaml (merge $own (.labels | default dict) .root.Values.commonLabels) -}}
{{- end -}}

{{/* Labels of a pod. None names a version: an upgrade of the chart that changes nothing of a pod restarts none. */}}
{{- define "warmfront.podLabels" -}}
{{- toYaml (merge (include "warmfront.selector" . | fromYaml) ((.config).podLabels | default dict) .root.Values.commonLabels) -}}
{{- end -}}

{{/* name, namespace, labels and annotations of an object. Takes {root, component, name, labels, annotations}. */}}
{{- define "warmfront.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "warmfront.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "warmfront.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "warmfront.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* Takes {image, tag}: the tag where the image names none. */}}
{{- define "warmfront.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .tag }}
{{- end -}}
{{- end -}}

{{/* A fleet is the set of replicas that may answer for each other: a change of what they agree on is a new fleet. */}}
{{- define "warmfront.fleet" -}}
{{- if .Values.cache.fleet -}}
{{- .Values.cache.fleet -}}
{{- else -}}
{{- $contract := dict "model" .Values.model "hashAlgorithm" .Values.cache.hashAlgorithm "blockSize" (int .Values.cache.blockSize) -}}
{{- if hasPrefix "xxhash" .Values.cache.hashAlgorithm -}}
{{- $_ := set $contract "hashSeed" .Values.cache.hashSeed -}}
{{- end -}}
{{- range $flag := list "dtype" "kv-cache-dtype" "mode" "max-model-len" "engine" -}}
{{- if hasKey $.Values.worker.flags $flag -}}
{{- $_ := set $contract $flag (include "warmfront.scalar" (get $.Values.worker.flags $flag)) -}}
{{- end -}}
{{- end -}}
{{- $place := printf "%s-%s" .Release.Namespace (include "warmfront.fullname" .) -}}
{{- printf "%s-%s" ($place | trunc 54 | trimSuffix "-") (printf "%s %s" $place (toJson $contract) | sha256sum | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* A value as the command line spells it: whole numbers without exponent. */}}
{{- define "warmfront.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* A map of flags as list items of `args`. A false one is --no-FLAG where the program knows that, else nothing; a list
     gives its flag several times. */}}
{{- define "warmfront.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "invalid" $value }}
{{- else if kindIs "bool" $value }}
{{- if $value }}
- --{{ $name }}
{{- else if has $name (list "continue-streams" "enable-prefix-caching" "hot" "prewarm" "token-reuse") }}
- --no-{{ $name }}
{{- end }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- --{{ $name }}
- {{ . | quote }}
{{- end }}
{{- else }}
- --{{ $name }}
- {{ include "warmfront.scalar" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The same map as lines of a file: whole numbers keep their digits. */}}
{{- define "warmfront.settings" -}}
{{- range $name, $value := . }}
{{- if or (kindIs "bool" $value) (kindIs "slice" $value) }}
{{ $name }}: {{ toJson $value }}
{{- else if not (kindIs "invalid" $value) }}
{{ $name }}: {{ include "warmfront.scalar" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Settings that both sides get, word for word the same, by the names of the program's flags. */}}
{{- define "warmfront.sharedSettings" -}}
prefix-caching-hash-algo: {{ .Values.cache.hashAlgorithm }}
block-size: {{ .Values.cache.blockSize | int }}
{{- if hasPrefix "xxhash" .Values.cache.hashAlgorithm }}
prefix-caching-hash-seed-file: {{ .Values.secretsPath }}/hash-seed
{{- end }}
listen: {{ .Values.listenAddress | quote }}
{{- end -}}

{{- define "warmfront.routerSettings" -}}
{{- $config := .Values.router -}}
{{- include "warmfront.sharedSettings" . }}
{{- include "warmfront.tlsSettings" (dict "root" . "component" "router") }}
http-port: {{ int $config.ports.http }}
grpc-port: {{ int $config.ports.grpc }}
metrics-port: {{ int $config.ports.metrics }}
drain-deadline: {{ int $config.drainDeadlineSeconds }}s
min-ready-replicas: {{ include "warmfront.minReadyReplicas" . }}
{{- if include "warmfront.ray" . }}
drain-notice: {{ include "warmfront.routerNoticeSeconds" . }}s
{{- end }}
{{- if $config.trustTenantHeader }}
trust-tenant-header: true
{{- end }}
{{- end -}}

{{/* Workers that there are at least, whoever scales them; one where that may be none. */}}
{{- define "warmfront.fewestWorkers" -}}
{{- $worker := .Values.worker -}}
{{- if $worker.keda.enabled -}}{{- max 1 (int $worker.keda.minReplicas) -}}
{{- else if $worker.ray.autoscale.enabled -}}{{- int $worker.ray.autoscale.minReplicas -}}
{{- else -}}{{- max 1 (int $worker.replicas) -}}
{{- end -}}
{{- end -}}

{{/* Workers that a new fleet begins with: half of them. As a power of two it seldom changes, which would roll routers. */}}
{{- define "warmfront.minReadyReplicas" -}}
{{- $fewest := int (include "warmfront.fewestWorkers" .) -}}
{{- $half := 1 -}}
{{- range until 10 -}}
{{- if le (int (mul 4 $half)) $fewest -}}{{- $half = int (mul 2 $half) -}}{{- end -}}
{{- end -}}
{{- .Values.router.minReadyReplicas | default $half -}}
{{- end -}}

{{/* For how long a router on Ray serves on after it has said that it leaves: its pod stays, so only a failed readiness probe
     tells Services, and two seconds more all of their proxies. Where the pod goes with it, that is preStop's part. */}}
{{- define "warmfront.routerNoticeSeconds" -}}
{{- if include "warmfront.ray" . -}}
{{- $probe := .Values.router.readinessProbe -}}
{{- add (mul ($probe.periodSeconds | default 10) ($probe.failureThreshold | default 3)) 2 -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{- define "warmfront.workerSettings" -}}
{{- $config := .Values.worker -}}
{{- include "warmfront.sharedSettings" . }}
{{- include "warmfront.tlsSettings" (dict "root" . "component" "worker") }}
metrics-port: {{ int $config.ports.metrics }}
drain-deadline: {{ int $config.drainDeadlineSeconds }}s
{{- with .Values.model.path }}
model: {{ . | quote }}
{{- end }}
{{- with .Values.model.servedName }}
served-model-name: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The first arguments of every router and worker. */}}
{{- define "warmfront.commonArgs" -}}
- --fleet
- {{ include "warmfront.fleet" . | quote }}
- --worker-token-file
- {{ .Values.secretsPath }}/worker-token
{{- end -}}

{{/* Whether a Redis of the user's is given ("true") or the bundled one runs (""). */}}
{{- define "warmfront.externalRedis" -}}
{{- if or .Values.redis.external.url .Values.redis.external.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "warmfront.redisPort" -}}
{{- $redis := .Values.redis -}}
{{- if not (include "warmfront.externalRedis" .) -}}
{{- int $redis.bundled.port -}}
{{- else -}}
{{- regexFind ":[0-9]+(/|\\?|$)" $redis.external.url | trimPrefix ":" | trimSuffix "/" | trimSuffix "?" | default (int $redis.external.port) -}}
{{- end -}}
{{- end -}}

{{/* The key of an external Redis' URL in its Secret. Takes {root, component}. */}}
{{- define "warmfront.redisKey" -}}
{{- $external := .root.Values.redis.external -}}
{{- get $external (get (dict "router" "routerKey" "worker" "workerKey" "head" "controllerKey") .component) | default $external.key -}}
{{- end -}}

{{/* Takes {root, component}. */}}
{{- define "warmfront.redisEnv" -}}
{{- $redis := .root.Values.redis -}}
{{- $fullname := include "warmfront.fullname" .root -}}
{{- if $redis.external.existingSecret }}
- name: WARMFRONT_REDIS
  valueFrom:
    secretKeyRef: {name: {{ $redis.external.existingSecret | quote }}, key: {{ include "warmfront.redisKey" . | quote }}}
{{- else if $redis.external.url }}
- name: WARMFRONT_REDIS
  value: {{ $redis.external.url | quote }}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $redis.bundled.existingSecret | default $fullname }}
      key: {{ $redis.bundled.key | quote }}
- name: WARMFRONT_REDIS
  value: redis://:$(REDIS_PASSWORD)@{{ $fullname }}-valkey:{{ int $redis.bundled.port }}/0
{{- end }}
{{- if $redis.external.caSecret.name }}
- name: SSL_CERT_FILE
  value: /run/secrets/redis-ca/{{ $redis.external.caSecret.key }}
{{- end }}
{{- end -}}

{{/* Environment of a router or worker. Takes {root, component, config, onRay}. */}}
{{- define "warmfront.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if not .onRay }}
- name: {{ ternary "WARMFRONT_ROUTER_ID" "WARMFRONT_REPLICA_ID" (eq .component "router") }}
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
{{- include "warmfront.redisEnv" . }}
{{- with .config.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Worker token, hash seed and certificates, as one volume: to each pod what it needs. Takes {root, component}. */}}
{{- define "warmfront.secretVolume" -}}
- name: secrets
  projected:
    defaultMode: 288 # 0440
    sources:
      {{- if ne .component "head" }}
      - secret:
          name: {{ .root.Values.workerToken.existingSecret | default (include "warmfront.fullname" .root) }}
          items: [{key: {{ .root.Values.workerToken.key | quote }}, path: worker-token}]
      {{- end }}
      {{- if include (ternary "warmfront.rayWorkers" "warmfront.ray" (eq .component "worker")) .root }}
      - secret:
          name: {{ .root.Values.ray.token.existingSecret | default (include "warmfront.fullname" .root) }}
          items: [{key: {{ .root.Values.ray.token.key | quote }}, path: ray-token}]
      {{- end }}
      {{- if hasPrefix "xxhash" .root.Values.cache.hashAlgorithm }}
      - secret:
          name: {{ .root.Values.cache.hashSeed.existingSecret | default (include "warmfront.fullname" .root) }}
          items: [{key: {{ .root.Values.cache.hashSeed.key | quote }}, path: hash-seed}]
      {{- end }}
      {{- with include "warmfront.tlsSources" . }}
      {{- . | nindent 6 }}
      {{- end }}
{{- with .root.Values.redis.external.caSecret }}
{{- if .name }}
- name: redis-ca
  secret: {secretName: {{ .name | quote }}, defaultMode: 288}
{{- end }}
{{- end }}
{{- end -}}

{{- define "warmfront.secretMounts" -}}
- {name: secrets, mountPath: {{ .Values.secretsPath }}, readOnly: true}
{{- if .Values.redis.external.caSecret.name }}
- {name: redis-ca, mountPath: /run/secrets/redis-ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* Constraints with the component's own selector where they have none. Takes {root, component, config}. */}}
{{- define "warmfront.topologySpread" -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (include "warmfront.selector" . | fromYaml)) -}}
{{- $constraints := list -}}
{{- range .config.topologySpreadConstraints -}}
{{- $constraints = append $constraints (merge (dict) . $selector) -}}
{{- end -}}
{{- if $constraints -}}
{{- toYaml $constraints -}}
{{- end -}}
{{- end -}}

{{/* Where and as whom a pod runs. Takes {root, component, config}. */}}
{{- define "warmfront.podPlacement" -}}
serviceAccountName: {{ include "warmfront.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .config.podSecurityContext | nindent 2 }}
{{- with .config.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .config.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .config.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .config.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .config.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "warmfront.topologySpread" . }}
topologySpreadConstraints:
  {{- . | nindent 2 }}
{{- end }}
{{- with .config.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A short hash of what a component's processes read once, at their start, of the user's own Secrets: a change of it
     rolls the pods at the next upgrade. Empty where Helm sees no cluster, and for Secrets of the chart's, which never change.
     TLS files are read again by themselves; a new hash seed or Ray token is a new fleet or cluster. Takes {root, component}. */}}
{{- define "warmfront.secretsChecksum" -}}
{{- $root := .root -}}
{{- $redis := $root.Values.redis -}}
{{- $read := list -}}
{{- if has .component (list "router" "worker") -}}
{{- $read = append $read (list $root.Values.workerToken.existingSecret $root.Values.workerToken.key) -}}
{{- end -}}
{{- if not (include "warmfront.externalRedis" $root) -}}
{{- $read = append $read (list $redis.bundled.existingSecret $redis.bundled.key) -}}
{{- else if ne .component "valkey" -}}
{{- $read = append $read (list $redis.external.existingSecret (include "warmfront.redisKey" .)) -}}
{{- end -}}
{{- $found := list -}}
{{- range $pair := $read -}}
{{- if first $pair -}}
{{- $held := (lookup "v1" "Secret" $root.Release.Namespace (first $pair) | default dict).data | default dict -}}
{{- with get $held (last $pair) -}}{{- $found = append $found . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if $found -}}
{{- toJson $found | sha256sum | trunc 8 -}}
{{- end -}}
{{- end -}}

{{- define "warmfront.podMetadata" -}}
labels:
  {{- include "warmfront.podLabels" . | nindent 2 }}
annotations:
  kubectl.kubernetes.io/default-container: {{ .component }}
  warmfront/fleet: {{ include "warmfront.fleet" .root | quote }}
  {{- with include "warmfront.secretsChecksum" . }}
  checksum/secrets: {{ . | quote }}
  {{- end }}
  {{- with merge (dict) .config.podAnnotations .root.Values.commonAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Takes a component's values, {margin, noticeSeconds}. */}}
{{- define "warmfront.grace" -}}
{{- $least := add (.preStopSeconds | default 0) (.noticeSeconds | default 0) .drainDeadlineSeconds -}}
{{- if kindIs "invalid" .terminationGracePeriodSeconds -}}
{{- add $least .margin -}}
{{- else -}}
{{- int .terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{/* What routers and workers both call. Takes {root}. */}}
{{- define "warmfront.egress" -}}
# Names, and Redis.
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
- ports:
    - {port: {{ include "warmfront.redisPort" .root }}, protocol: TCP}
    {{- if include "warmfront.externalRedis" .root }}
    {{- range .root.Values.redis.external.morePorts }}
    - {port: {{ int . }}, protocol: TCP}
    {{- end }}
    {{- end }}
  {{- if not (include "warmfront.externalRedis" .root) }}
  to:
    - podSelector:
        matchLabels:
          {{- include "warmfront.selector" (dict "root" .root "component" "valkey") | nindent 10 }}
  {{- else if .root.Values.networkPolicy.redis }}
  to:
    {{- toYaml .root.Values.networkPolicy.redis | nindent 4 }}
  {{- end }}
{{- with .root.Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Seconds of a duration such as 200ms, 60s, 5m or 1h. */}}
{{- define "warmfront.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 -}}
{{- mulf (regexFind "^[0-9.]+" .) (get $units (regexFind "[a-z]+$" .)) -}}
{{- end -}}
