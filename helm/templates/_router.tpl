{{/* A router's pod: its metadata and spec. */}}
{{- define "warmfront.routerPod" -}}
{{- $config := .Values.router }}
{{- $part := dict "root" . "component" "router" "config" $config }}
{{- /* A kubelet has no certificate to show: the metrics port answers in plain HTTP. */}}
{{- $probed := ternary "metrics" "http" .Values.tls.public.enabled -}}
metadata:
  {{- include "warmfront.podMetadata" $part | nindent 2 }}
spec:
  {{- include "warmfront.podPlacement" $part | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "warmfront.grace" (merge (dict "margin" 15) $config) }}
  containers:
    - name: router
      image: {{ include "warmfront.image" (dict "image" $config.image "tag" .Chart.AppVersion) }}
      imagePullPolicy: {{ $config.image.pullPolicy }}
      command: [warmfront, router]
      args:
        {{- include "warmfront.sharedArgs" . | nindent 8 }}
        {{- include "warmfront.tlsArgs" $part | trim | nindent 8 }}
        - --http-port
        - {{ int $config.ports.http | quote }}
        - --grpc-port
        - {{ int $config.ports.grpc | quote }}
        - --metrics-port
        - {{ int $config.ports.metrics | quote }}
        - --drain-deadline
        - {{ int $config.drainDeadlineSeconds }}s
        {{- if $config.trustTenantHeader }}
        - --trust-tenant-header
        {{- end }}
        {{- with include "warmfront.flags" $config.flags }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $config.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "warmfront.env" $part | nindent 8 }}
      {{- with $config.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: http, containerPort: {{ int $config.ports.http }}}
        - {name: grpc, containerPort: {{ int $config.ports.grpc }}}
        - {name: metrics, containerPort: {{ int $config.ports.metrics }}}
      startupProbe:
        httpGet: {path: /healthz, port: {{ $probed }}}
        {{- toYaml $config.startupProbe | nindent 8 }}
      livenessProbe:
        httpGet: {path: /healthz, port: {{ $probed }}}
        {{- toYaml $config.livenessProbe | nindent 8 }}
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
        {{- with $config.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $config.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "warmfront.secretVolume" $part | nindent 4 }}
    - name: tmp
      emptyDir: {sizeLimit: 256Mi}
    {{- with $config.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
