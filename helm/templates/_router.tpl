{{/* A router's pod: its metadata and spec. */}}
{{- define "warmfront.routerPod" -}}
{{- $config := .Values.router }}
{{- $part := dict "root" . "component" "router" "config" $config }}
{{- $onRay := include "warmfront.ray" . }}
{{- $nodeManager := int .Values.ray.ports.nodeManager }}
{{- /* A kubelet has no certificate to show: the metrics port answers in plain HTTP. */}}
{{- $probed := ternary "metrics" "http" .Values.tls.public.enabled -}}
metadata:
  {{- include "warmfront.podMetadata" $part | nindent 2 }}
spec:
  {{- include "warmfront.podPlacement" $part | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "warmfront.grace" (merge (dict "margin" 15 "noticeSeconds" (include "warmfront.routerNoticeSeconds" .)) $config) }}
  containers:
    - name: router
      image: {{ include "warmfront.image" (dict "image" $config.image "tag" .Chart.AppVersion) }}
      imagePullPolicy: {{ $config.image.pullPolicy }}
      {{- if $onRay }}
      command: [ray, start] # a node on which the controller places one router
      args:
        {{- include "warmfront.rayArgs" (dict "root" . "resource" (include "warmfront.rayResource" $part)) | nindent 8 }}
      {{- else }}
      command: [warmfront, router]
      args:
        {{- include "warmfront.commonArgs" . | nindent 8 }}
        {{- include "warmfront.flags" (include "warmfront.routerSettings" . | fromYaml) | trim | nindent 8 }}
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
        {{- include "warmfront.rayEnv" (dict "root" . "drainSeconds" (add (include "warmfront.routerNoticeSeconds" .) $config.drainDeadlineSeconds 5)) | nindent 8 }}
        {{- end }}
      {{- with $config.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: http, containerPort: {{ int $config.ports.http }}}
        - {name: grpc, containerPort: {{ int $config.ports.grpc }}}
        - {name: metrics, containerPort: {{ int $config.ports.metrics }}}
      {{- if $onRay }}
      # The node's own; a router that hangs is the controller's to replace.
      {{- include "warmfront.rayProbes" (dict "port" $nodeManager "startup" $config.startupProbe "liveness" $config.livenessProbe) | nindent 6 }}
      {{- else }}
      startupProbe:
        httpGet: {path: /healthz, port: {{ $probed }}}
        {{- toYaml $config.startupProbe | nindent 8 }}
      livenessProbe:
        httpGet: {path: /healthz, port: {{ $probed }}}
        {{- merge (dict) $config.livenessProbe (dict "timeoutSeconds" 3 "failureThreshold" 3) | toYaml | nindent 8 }}
      {{- end }}
      readinessProbe:
        httpGet: {path: /readyz, port: {{ $probed }}}
        {{- toYaml $config.readinessProbe | nindent 8 }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ int $config.preStopSeconds | quote }}]}
      resources:
        {{- toYaml $config.resources | nindent 8 }}
      securityContext:
        {{- toYaml $config.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "warmfront.secretMounts" . | nindent 8 }}
        - {name: tmp, mountPath: /tmp}
        {{- if $onRay }}
        - {name: shm, mountPath: /dev/shm}
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
      emptyDir: {sizeLimit: {{ ternary "1Gi" "256Mi" (ne $onRay "") }}}
    {{- if $onRay }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 128Mi}
    {{- end }}
    {{- with $config.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
