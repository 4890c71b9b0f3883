{{/* Ray: what its pods run, and what its controller reads. Only with ray.mode static or kuberay. */}}

{{/* Whether routers are Ray actors ("true"), and whether workers are. */}}
{{- define "warmfront.ray" -}}
{{- if ne .Values.ray.mode "none" }}true{{ end -}}
{{- end -}}

{{- define "warmfront.rayWorkers" -}}
{{- if and (ne .Values.ray.mode "none") (eq .Values.worker.placement "ray") }}true{{ end -}}
{{- end -}}

{{/* Components whose pods are Ray nodes, as a selector: Ray's own ports are open among them alone. */}}
{{- define "warmfront.rayNodes" -}}
matchLabels:
  {{- omit (include "warmfront.selector" (dict "root" . "component" "") | fromYaml) "app.kubernetes.io/component" | toYaml | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [head, router{{ if include "warmfront.rayWorkers" . }}, worker{{ end }}]}
{{- end -}}

{{/* All of Ray's ports, among its nodes. Takes {root, way}. */}}
{{- define "warmfront.rayRule" -}}
- {{ .way }}:
    - podSelector:
        {{- include "warmfront.rayNodes" .root | nindent 8 }}
{{- end -}}

{{/* Workers that a pod has room for: one per GPU. Each takes the first free metrics port of so many. */}}
{{- define "warmfront.workersPerPod" -}}
{{- max 1 (int .Values.worker.gpu.count) -}}
{{- end -}}

{{/* Most workers of an autoscaled fleet on Ray. */}}
{{- define "warmfront.mostRayWorkers" -}}
{{- with .Values.worker.ray -}}
{{- .autoscale.maxReplicas | default (sub (mul .nodes (include "warmfront.workersPerPod" $)) .surge) -}}
{{- end -}}
{{- end -}}

{{/* Arguments of `ray start`. Takes {root, resource, gpus}; without a resource it is the head. Every port has its number, so
     that none that Ray picks is one of ours. */}}
{{- define "warmfront.rayArgs" -}}
{{- $ports := .root.Values.ray.ports -}}
- --block
{{- if .resource }}
- --address={{ include "warmfront.fullname" .root }}-head:{{ int $ports.gcs }}
- '--resources={"{{ .resource }}": {{ .gpus | default 1 }}}'
{{- else }}
- --head
- --port={{ int $ports.gcs }}
- --ray-client-server-port={{ add $ports.others 5 }}
- --include-dashboard=false
{{- end }}
- --node-ip-address=$(POD_IP)
- --node-manager-port={{ int $ports.nodeManager }}
- --object-manager-port={{ int $ports.others }}
- --runtime-env-agent-port={{ add $ports.others 1 }}
- --dashboard-agent-listen-port={{ add $ports.others 2 }}
- --dashboard-agent-grpc-port={{ add $ports.others 3 }}
- --metrics-export-port={{ add $ports.others 4 }}
- --min-worker-port={{ int $ports.workers }}
- --max-worker-port={{ add $ports.workers 99 }}
- --num-cpus=0
- --num-gpus={{ .gpus | default 0 }}
- --object-store-memory=78643200 # the least; nothing of ours goes through it
- --temp-dir=/tmp/ray
- --include-log-monitor=false
{{- if not .resource }}
- --no-monitor # of the autoscaler, which has nothing to scale here
{{- end }}
- --disable-usage-stats
{{- end -}}

{{/* Environment of Ray's processes. Takes {root, drainSeconds}. */}}
{{- define "warmfront.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN_PATH, value: {{ .root.Values.secretsPath }}/ray-token}
- {name: RAY_LOG_TO_STDERR, value: "1"} # the pod's log, actors included
- {name: RAY_BACKEND_LOG_LEVEL, value: error}
- {name: RAY_enable_metrics_collection, value: "0"} # nobody reads Ray's own
- {name: RAY_worker_niceness, value: "0"} # actors would run at nice 15
- {name: RAY_memory_monitor_refresh_ms, value: "0"} # it kills actors without a word; the pod's limit does it with one
- {name: RAY_DISABLE_FAILURE_SIGNAL_HANDLER, value: "1"} # SIGTERM is ours to handle
- {name: RAY_ENABLE_UV_RUN_RUNTIME_ENV, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# After SIGTERM a node drains: the controller lets its actors end, and Ray waits so long for that. A head waits for nothing.
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ .drainSeconds | default 0 | quote }}}
{{- end -}}

{{/* Probes of a Ray node: its raylet, or the head's GCS. Takes {port, startup, liveness}, the latter two with what the user
     wants other than here. */}}
{{- define "warmfront.rayProbes" -}}
{{- $asked := dict "grpc" (dict "port" .port) -}}
startupProbe:
  {{- merge $asked (.startup | default dict) (dict "periodSeconds" 2 "timeoutSeconds" 2 "failureThreshold" 60) | toYaml | nindent 2 }}
{{- $asked = dict "grpc" (dict "port" .port) }}
livenessProbe:
  {{- merge $asked (.liveness | default dict) (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6) | toYaml | nindent 2 }}
{{- end -}}

{{/* The resource of Ray that a part takes one of. A change of what its pods agree on with the desired state is another
     resource: a part of the one is never placed on a node of the other. Takes {root, component, config}. */}}
{{- define "warmfront.rayResource" -}}
{{- $agreed := dict "fleet" (include "warmfront.fleet" .root) "ports" .config.ports "listen" .root.Values.listenAddress "secrets" .root.Values.secretsPath -}}
{{- printf "warmfront_%s_%s" .component (toJson $agreed | sha256sum | trunc 8) -}}
{{- end -}}

{{/* The head's pod: Ray's head, and the controller as a driver beside it. */}}
{{- define "warmfront.headPod" -}}
{{- $config := .Values.ray.head }}
{{- $part := dict "root" . "component" "head" "config" $config -}}
metadata:
  {{- include "warmfront.podMetadata" $part | nindent 2 }}
spec:
  {{- include "warmfront.podPlacement" $part | nindent 2 }}
  shareProcessNamespace: true # the controller finds its node of Ray among the processes that it sees
  terminationGracePeriodSeconds: 30
  containers:
    - name: head
      image: {{ include "warmfront.image" (dict "image" .Values.router.image "tag" .Chart.AppVersion) }}
      imagePullPolicy: {{ .Values.router.image.pullPolicy }}
      command: [ray, start]
      args:
        {{- include "warmfront.rayArgs" (dict "root" .) | nindent 8 }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- include "warmfront.redisEnv" $part | nindent 8 }}
        {{- include "warmfront.rayEnv" (dict "root" .) | nindent 8 }}
        # What Ray knows of its actors is on a volume: a head that comes back finds them where they run.
        - {name: RAY_gcs_storage, value: rocksdb}
        - {name: RAY_gcs_storage_path, value: /var/lib/warmfront/gcs}
        {{- with $config.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: gcs, containerPort: {{ int .Values.ray.ports.gcs }}}
      {{- include "warmfront.rayProbes" (dict "port" (int .Values.ray.ports.gcs)) | nindent 6 }}
      readinessProbe:
        grpc: {port: {{ int .Values.ray.ports.gcs }}}
        periodSeconds: 2
        timeoutSeconds: 2
      resources:
        {{- toYaml $config.resources | nindent 8 }}
      securityContext:
        {{- toYaml $config.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "warmfront.secretMounts" . | nindent 8 }}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: state, mountPath: /var/lib/warmfront}
        - {name: desired, mountPath: /etc/warmfront, readOnly: true} # the controller's loop is an actor here
    - name: controller
      image: {{ include "warmfront.image" (dict "image" .Values.router.image "tag" .Chart.AppVersion) }}
      imagePullPolicy: {{ .Values.router.image.pullPolicy }}
      command: [warmfront, controller]
      args:
        - --desired
        - /etc/warmfront/{{ include "warmfront.fleet" . }}/desired.yaml
        - --state-dir
        - /var/lib/warmfront/{{ include "warmfront.fleet" . }}
        - --ray-address
        - {{ include "warmfront.fullname" . }}-head:{{ int .Values.ray.ports.gcs }}
        - --metrics-port
        - {{ int .Values.ray.ports.controllerMetrics | quote }}
        - --listen
        - {{ .Values.listenAddress | quote }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- include "warmfront.redisEnv" $part | nindent 8 }}
        {{- include "warmfront.rayEnv" (dict "root" .) | nindent 8 }}
        {{- with $config.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: metrics, containerPort: {{ int .Values.ray.ports.controllerMetrics }}}
      startupProbe: # it listens once it has joined Ray, for which it gives up by itself
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 5
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
      resources:
        {{- toYaml $config.controllerResources | nindent 8 }}
      securityContext:
        {{- toYaml $config.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "warmfront.secretMounts" . | nindent 8 }}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: state, mountPath: /var/lib/warmfront}
        - {name: desired, mountPath: /etc/warmfront, readOnly: true}
  volumes:
    {{- include "warmfront.secretVolume" $part | nindent 4 }}
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 128Mi}
    - name: desired
      configMap:
        name: {{ include "warmfront.fullname" . }}-desired
        items: [{key: desired.yaml, path: {{ include "warmfront.fleet" . }}/desired.yaml}]
    {{- if not $config.storage.enabled }}
    - name: state
      emptyDir: {sizeLimit: {{ $config.storage.size }}} # outlives the container, not the pod
    {{- else if eq .Values.ray.mode "kuberay" }}
    - name: state
      persistentVolumeClaim: {claimName: {{ include "warmfront.fullname" . }}-head}
    {{- end }}
{{- end -}}

{{/* The desired state: what `warmfront controller` reads. Secrets and the Redis URL are read by each part on its own node. */}}
{{- define "warmfront.desired" -}}
{{- $router := dict "root" . "component" "router" "config" .Values.router -}}
fleet: {{ include "warmfront.fleet" . | quote }}
worker-token-file: {{ .Values.secretsPath }}/worker-token
routers:
  count: each-node
  resources: { {{- include "warmfront.rayResource" $router }}: 1}
  settings:
    {{- include "warmfront.settings" (include "warmfront.routerSettings" . | fromYaml) | trim | nindent 4 }}
    {{- with include "warmfront.settings" .Values.router.flags | trim }}
    {{- . | nindent 4 }}
    {{- end }}
{{- if include "warmfront.rayWorkers" . }}
{{- $config := .Values.worker }}
{{- $worker := dict "root" . "component" "worker" "config" $config }}
workers:
  replicas: {{ int $config.replicas }}
  num-gpus: {{ ternary 1 0 (gt (int $config.gpu.count) 0) }}
  resources: { {{- include "warmfront.rayResource" $worker }}: 1}
  start-deadline: {{ int $config.startupDeadlineSeconds }}s
  rollout:
    surge: {{ int $config.ray.surge }}
    batch: {{ int $config.ray.batch }}
    {{- with $config.ray.whenBelow }}
    when-below: {{ . }}
    {{- end }}
    deadline: {{ add (mul $config.startupDeadlineSeconds (ternary (include "warmfront.mostRayWorkers" .) (toString $config.replicas) $config.ray.autoscale.enabled)) 300 }}s
  {{- with $config.ray.autoscale }}
  {{- if .enabled }}
  autoscale:
    min: {{ int .minReplicas }}
    max: {{ include "warmfront.mostRayWorkers" $ }}
    {{- range $key, $value := dict "target-wait" .targetWait "up-window" .upWindow "down-window" .downWindow }}
    {{- with $value }}
    {{ $key }}: {{ . }}
    {{- end }}
    {{- end }}
  {{- end }}
  {{- end }}
  settings:
    {{- include "warmfront.settings" (include "warmfront.workerSettings" . | fromYaml) | trim | nindent 4 }}
    {{- with include "warmfront.settings" $config.flags | trim }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}
