{{/* TLS: which Secrets hold what, and how routers and workers are told. Every Secret has tls.crt and tls.key, and ca.crt. */}}

{{/* Name of the Secret of one certificate. Takes {root, name: public|worker|router, given}. */}}
{{- define "warmfront.tlsSecret" -}}
{{- .given | default (printf "%s-%s-tls" (include "warmfront.fullname" .root) .name) -}}
{{- end -}}

{{- define "warmfront.workerServerName" -}}
{{- .Values.tls.workers.serverName | default (printf "%s-worker" (include "warmfront.fullname" .)) -}}
{{- end -}}

{{- define "warmfront.publicScheme" -}}
{{- ternary "https" "http" .Values.tls.public.enabled -}}
{{- end -}}

{{/* Settings of one component, and plain text only where there is no TLS. Takes {root, component}. */}}
{{- define "warmfront.tlsSettings" -}}
{{- $tls := .root.Values.tls -}}
{{- $path := .root.Values.secretsPath -}}
{{- if eq .component "router" }}
{{- if $tls.public.enabled }}
tls-cert: {{ $path }}/public.crt
tls-key: {{ $path }}/public.key
{{- if $tls.public.clientCaSecret }}
tls-client-ca: {{ $path }}/clients-ca.crt
{{- end }}
{{- else }}
insecure-listen: true
{{- end }}
{{- if $tls.workers.enabled }}
worker-ca: {{ $path }}/workers-ca.crt
worker-client-cert: {{ $path }}/router.crt
worker-client-key: {{ $path }}/router.key
worker-server-name: {{ include "warmfront.workerServerName" .root | quote }}
{{- end }}
{{- else if $tls.workers.enabled }}
tls-cert: {{ $path }}/worker.crt
tls-key: {{ $path }}/worker.key
tls-client-ca: {{ $path }}/routers-ca.crt
{{- else }}
insecure-listen: true
{{- end }}
{{- end -}}

{{/* Sources of the projected volume. No pod has a key that is not its own. Takes {root, component}. */}}
{{- define "warmfront.tlsSources" -}}
{{- $tls := .root.Values.tls -}}
{{- $public := include "warmfront.tlsSecret" (dict "root" .root "name" "public" "given" $tls.public.existingSecret) -}}
{{- $worker := include "warmfront.tlsSecret" (dict "root" .root "name" "worker" "given" $tls.workers.existingSecret) -}}
{{- $router := include "warmfront.tlsSecret" (dict "root" .root "name" "router" "given" $tls.workers.routerSecret) -}}
{{- if eq .component "router" }}
{{- if $tls.public.enabled }}
- secret:
    name: {{ $public | quote }}
    items: [{key: tls.crt, path: public.crt}, {key: tls.key, path: public.key}]
- secret: # for `warmfront status` in the pod; one of a public authority has none
    name: {{ $public | quote }}
    items: [{key: ca.crt, path: public-ca.crt}]
    optional: true
{{- with $tls.public.clientCaSecret }}
- secret:
    name: {{ . | quote }}
    items: [{key: ca.crt, path: clients-ca.crt}]
{{- end }}
{{- end }}
{{- if $tls.workers.enabled }}
- secret:
    name: {{ $router | quote }}
    items: [{key: tls.crt, path: router.crt}, {key: tls.key, path: router.key}]
- secret:
    name: {{ $worker | quote }}
    items: [{key: ca.crt, path: workers-ca.crt}]
{{- end }}
{{- else if and $tls.workers.enabled (eq .component "worker") }}
- secret:
    name: {{ $worker | quote }}
    items: [{key: tls.crt, path: worker.crt}, {key: tls.key, path: worker.key}]
- secret:
    name: {{ $router | quote }}
    items: [{key: ca.crt, path: routers-ca.crt}]
{{- end }}
{{- end -}}
