{{/* A worker's pod: its metadata and spec. */}}
{{- define "warmfront.workerPod" -}}
{{- $config := .Values.worker }}
{{- $part := dict "root" . "component" "worker" "config" $config }}
{{- $variant := ternary "cuda" "cpu" (gt (int $config.gpu.count) 0) }}
{{- $volume := .Values.model.volume }}
{{- $onRay := include "warmfront.rayWorkers" . }}
{{- $nodeManager := int .Values.ray.ports.nodeManager }}
{{- /* A kubelet's gRPC probe knows no TLS: the metrics port answers in plain HTTP. */}}
{{- $ready := printf "grpc: {port: %d}" (int $config.ports.grpc) }}
{{- $alive := $ready }}
{{- if .Values.tls.workers.enabled }}
{{- $ready = "httpGet: {path: /readyz, port: metrics}" }}
{{- $alive = "httpGet: {path: /healthz, port: metrics}" }}
{{- end -}}
metadata:
  {{- include "warmfront.podMetadata" $part | nindent 2 }}
spec:
  {{- include "warmfront.podPlacement" $part | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "warmfront.grace" (merge (dict "margin" 30) $config) }}
  containers:
    - name: worker
      image: {{ include "warmfront.image" (dict "image" $config.image "tag" (printf "%s-%s" .Chart.AppVersion $variant)) }}
      imagePullPolicy: {{ $config.image.pullPolicy }}
      {{- if $onRay }}
      command: [ray, start] # a node on which the controller places workers
      args:
        {{- include "warmfront.rayArgs" (dict "root" . "resource" (include "warmfront.rayResource" $part) "gpus" (int $config.gpu.count)) | nindent 8 }}
      {{- else }}
      command: [warmfront, worker]
      args:
        {{- include "warmfront.commonArgs" . | nindent 8 }}
        - --port
        - {{ int $config.ports.grpc | quote }}
        - --advertise
        - $(POD_IP)
        {{- include "warmfront.flags" (include "warmfront.workerSettings" . | fromYaml) | trim | nindent 8 }}
        {{- with include "warmfront.flags" $config.flags | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $config.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      env:
        {{- include "warmfront.env" (merge (dict "onRay" $onRay) $part) | nindent 8 }}
        {{- if $onRay }}
        {{- include "warmfront.rayEnv" (dict "root" . "drainSeconds" (add $config.drainDeadlineSeconds 15)) | nindent 8 }}
        - name: OMP_NUM_THREADS # Ray would give an actor one
          valueFrom: {resourceFieldRef: {containerName: worker, resource: requests.cpu}}
        {{- end }}
      {{- with $config.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $onRay }}
      ports:
        {{- range $number := until (int (include "warmfront.workersPerPod" .)) }}
        - {name: metrics-{{ $number }}, containerPort: {{ add $config.ports.metrics $number }}}
        {{- end }}
      {{- include "warmfront.rayProbes" (dict "port" $nodeManager "liveness" $config.livenessProbe) | nindent 6 }}
      readinessProbe:
        grpc: {port: {{ $nodeManager }}}
        {{- toYaml $config.readinessProbe | nindent 8 }}
      {{- else }}
      ports:
        - {name: grpc, containerPort: {{ int $config.ports.grpc }}}
        - {name: metrics, containerPort: {{ int $config.ports.metrics }}}
      # The worker's health is SERVING exactly while it is READY: loaded and pre-warmed.
      startupProbe:
        {{- $ready | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $config.startupDeadlineSeconds 4) 5 }}
      livenessProbe:
        {{- $alive | nindent 8 }}
        {{- toYaml $config.livenessProbe | nindent 8 }}
        {{- if not (hasKey $config.livenessProbe "failureThreshold") }}
        failureThreshold: {{ add (div $config.drainDeadlineSeconds ($config.livenessProbe.periodSeconds | default 10)) 3 }} # a drain outlasts none
        {{- end }}
      readinessProbe:
        {{- $ready | nindent 8 }}
        {{- toYaml $config.readinessProbe | nindent 8 }}
      {{- end }}
      {{- with $config.lifecycle }}
      lifecycle:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- $resources := deepCopy $config.resources }}
      {{- if gt (int $config.gpu.count) 0 }}
      {{- $gpu := dict $config.gpu.resource (int $config.gpu.count) }}
      {{- $_ := set $resources "limits" (merge $gpu ($resources.limits | default dict)) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- toYaml $config.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "warmfront.secretMounts" . | nindent 8 }}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if or $volume.existingClaim $volume.source }}
        - name: model
          mountPath: {{ $volume.mountPath }}
          readOnly: true
          {{- with $volume.subPath }}
          subPath: {{ . }}
          {{- end }}
        {{- end }}
        {{- with $config.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $config.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "warmfront.secretVolume" $part | nindent 4 }}
    - name: tmp
      emptyDir: {sizeLimit: {{ $config.tmpSize }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $config.shmSize }}}
    {{- if $volume.existingClaim }}
    - name: model
      persistentVolumeClaim: {claimName: {{ $volume.existingClaim }}, readOnly: true}
    {{- else if $volume.source }}
    - name: model
      {{- toYaml $volume.source | nindent 6 }}
    {{- end }}
    {{- with $config.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
