{{/* The alerts. Each expression names metrics of docs/reference.md only. */}}

{{/* Hit rate of pods that were there a minute before the window began: what is cold after a start is left out.
     Synthetic traffic counts in neither metric. */}}
{{- define "warmfront.hitRate" -}}
sum(rate(warmfront_worker_prefix_cache_hits_tokens_total{ {{- .pods -}} }[{{ .window }}] {{ .then }}) and warmfront_worker_prefix_cache_hits_tokens_total{ {{- .pods -}} } offset {{ .before }}) / sum(rate(warmfront_worker_prefix_cache_queries_tokens_total{ {{- .pods -}} }[{{ .window }}] {{ .then }}) and warmfront_worker_prefix_cache_queries_tokens_total{ {{- .pods -}} } offset {{ .before }})
{{- end -}}

{{/* Share of requests that were answered with 429. Takes the routers' matchers. */}}
{{- define "warmfront.shedShare" -}}
sum(rate(warmfront_router_requests_total{ {{- . -}}, code="RESOURCE_EXHAUSTED"}[5m])) / sum(rate(warmfront_router_requests_total{ {{- . -}} }[5m]))
{{- end -}}

{{- define "warmfront.alerts" -}}
{{- $rule := .Values.metrics.prometheusRule }}
{{- $fullname := include "warmfront.fullname" . }}
{{- $router := printf "namespace=%q, pod=~%q" .Release.Namespace (printf "%s-router-.+" $fullname) }}
{{- $worker := printf "namespace=%q, pod=~%q" .Release.Namespace (printf "%s-worker-.+" $fullname) }}
- alert: WarmfrontHitRateLow
  expr: {{ include "warmfront.hitRate" (dict "pods" $worker "window" "10m" "then" "" "before" "11m") }} < {{ $rule.lowHitRate }}
  for: 15m
  annotations:
    summary: Fewer prompt tokens than usual come from the cache.
    description: "Hit rate {{ `{{ $value | humanizePercentage }}` }}. `warmfront status` says whether prompts do not match or blocks are evicted before reuse."
- alert: WarmfrontHitRateFalling
  expr: ({{ include "warmfront.hitRate" (dict "pods" $worker "window" "1h" "then" "" "before" "61m") }}) < {{ $rule.fallenHitRate }} * ({{ include "warmfront.hitRate" (dict "pods" $worker "window" "1h" "then" "offset 1d" "before" "1501m") }})
  for: 30m
  annotations:
    summary: The hit rate has fallen since yesterday at this time.
    description: "Now / then of the last hour is under {{ $rule.fallenHitRate }}. Did prompts change, or did tenants or replicas?"
- alert: WarmfrontYoungEvictions
  expr: sum(rate(warmfront_worker_evicted_age_seconds_sum{ {{- $worker -}} }[15m])) / sum(rate(warmfront_worker_evicted_age_seconds_count{ {{- $worker -}} }[15m])) < {{ $rule.youngEvictionSeconds }}
  for: 15m
  annotations:
    summary: Blocks are evicted soon after their last use.
    description: "Evicted blocks had been idle for {{ `{{ $value | humanizeDuration }}` }} on average: the pools are small for this load (worker.flags.kv-blocks, more workers)."
- alert: WarmfrontIndexNotLive
  expr: max by (pod) (warmfront_router_index_mode{ {{- $router -}}, mode!="live"}) == 1
  for: 5m
  annotations:
    summary: "Router {{ `{{ $labels.pod }}` }} does not follow the workers' caches."
    description: It places requests from a snapshot or from what it remembers. Is Redis there?
- alert: WarmfrontEventLag
  expr: histogram_quantile(0.99, sum by (le, pod) (rate(warmfront_router_index_event_lag_seconds_bucket{ {{- $router -}} }[10m]))) > {{ $rule.eventLagSeconds }}
  for: 10m
  annotations:
    summary: "Router {{ `{{ $labels.pod }}` }} hears late of what its workers cache."
    description: "One change in a hundred takes over {{ `{{ $value | humanizeDuration }}` }} to reach its index, so requests go to caches as they were then. Is Redis slow, or the router's processor full?"
- alert: WarmfrontEventGaps
  expr: sum(rate(warmfront_router_index_gaps_total{ {{- $router -}} }[10m])) > 0.1
  for: 15m
  annotations:
    summary: Routers miss cache events and reload snapshots.
    description: "{{ `{{ $value }}` }} gaps/s. Events come faster than routers read, or Redis drops keys (its policy must be noeviction)."
- alert: WarmfrontRedisDown
  expr: min(warmfront_router_redis_up{ {{- $router -}} }) == 0
  for: 2m
  annotations:
    summary: Redis does not answer a router.
    description: Requests go on from the routers' mirrors; no worker can join.
- alert: WarmfrontReplicasRefused
  expr: max(warmfront_router_replicas_refused{ {{- $router -}} }) > 0
  for: 5m
  annotations:
    summary: Workers differ from their fleet and get no traffic.
    description: "`warmfront status` names what differs."
- alert: WarmfrontReplicaHung
  expr: max(warmfront_router_replicas_hung{ {{- $router -}} }) > 0
  for: 30s
  annotations:
    summary: A worker's engine stands still in one step.
    description: "`warmfront status` names it. Requests go to others; after two minutes it ends and is started again. Is its device ill?"
- alert: WarmfrontNoReplicaReady
  expr: max(warmfront_router_replicas_ready{ {{- $router -}} }) == 0
  for: 1m
  labels: {severity: critical}
  annotations:
    summary: No worker is ready.
    description: Every request is answered with 503.
- alert: WarmfrontRoutersAbsent
  expr: absent(warmfront_router_replicas_ready{ {{- $router -}} })
  for: 3m
  labels: {severity: critical}
  annotations:
    summary: Prometheus sees no router.
    description: All of them are gone, or their /metrics cannot be reached; then every other alert about routers is silent too.
- alert: WarmfrontShedding
  expr: {{ include "warmfront.shedShare" $router }} > {{ $rule.shedShare }}
  for: 5m
  annotations:
    summary: Requests are refused because every queue is full.
    description: "{{ `{{ $value | humanizePercentage }}` }} of requests of the last five minutes got 429: more has come than the workers can take."
- alert: WarmfrontSheddingHalf
  expr: {{ include "warmfront.shedShare" $router }} > 0.5
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: Most requests are refused because every queue is full.
    description: "{{ `{{ $value | humanizePercentage }}` }} of requests of the last five minutes got 429."
- alert: WarmfrontQueueStands
  expr: sum(warmfront_router_queue_requests{ {{- $router -}} }) > 0
  for: 10m
  annotations:
    summary: Routers' queues have not been empty for ten minutes.
    description: "{{ `{{ $value }}` }} requests wait until a worker has room: first tokens come late, and 429 comes next."
- alert: WarmfrontErrors
  expr: sum(rate(warmfront_router_requests_total{ {{- $router -}}, code=~"INTERNAL|UNAVAILABLE|UNKNOWN|DEADLINE_EXCEEDED"}[5m])) / sum(rate(warmfront_router_requests_total{ {{- $router -}} }[5m])) > 0.01
  for: 5m
  annotations:
    summary: More than 1 % of requests fail.
    description: "{{ `{{ $value | humanizePercentage }}` }} of requests of the last five minutes."
- alert: WarmfrontFailovers
  expr: sum(rate(warmfront_router_failovers_total{ {{- $router -}} }[10m])) > 0.05
  for: 10m
  annotations:
    summary: Streams are moved to other workers.
    description: "{{ `{{ $value }}` }} per second: workers die in mid-stream."
- alert: WarmfrontPrewarmMissed
  expr: sum(increase(warmfront_router_prewarm_missed_total{ {{- $router -}} }[30m])) / (sum(increase(warmfront_router_prewarm_missed_total{ {{- $router -}} }[30m])) + sum(increase(warmfront_router_prewarm_tokens_total{ {{- $router -}} }[30m]))) > 0.3
  annotations:
    summary: New workers became ready without the fleet's hottest prefixes.
    description: "{{ `{{ $value | humanizePercentage }}` }} of the hot set was missing: a longer worker.flags.prewarm-deadline, or larger pools."
{{- if include "warmfront.ray" . }}
{{- $head := printf "namespace=%q, pod=~%q" .Release.Namespace (printf "%s-head-.+" $fullname) }}
- alert: WarmfrontControllerAbsent
  expr: absent(warmfront_controller_parts_wanted{ {{- $head -}} })
  for: 10m
  annotations:
    summary: Prometheus sees no controller.
    description: Requests go on, but no router or worker that ends on Ray is replaced, and nothing is rolled out or scaled.
- alert: WarmfrontRolloutFailed
  expr: max by (role) (warmfront_controller_rollout_failed{ {{- $head -}} }) == 1
  annotations:
    summary: "New settings of {{ `{{ $labels.role }}` }}s failed and were rolled back."
    description: "The controller's log says why; it tries again when the values change."
- alert: WarmfrontDesiredRefused
  expr: max(warmfront_controller_desired_refused{ {{- $head -}} }) == 1
  for: 2m
  annotations:
    summary: The controller refuses the desired state.
    description: What ran goes on. The controller's log names the key.
- alert: WarmfrontPartsMissing
  expr: max by (role) (warmfront_controller_parts_wanted{ {{- $head -}} } - warmfront_controller_parts_ready{ {{- $head -}} }) > 0
  for: 15m
  annotations:
    summary: "Some {{ `{{ $labels.role }}` }}s that should run on Ray are not ready."
    description: "{{ `{{ $value }}` }} are missing: their nodes, or what they log at their start."
{{- end }}
- alert: WarmfrontCertificateEnds
  expr: min by (pod, certificate) (warmfront_router_tls_certificate_expiry_timestamp_seconds{ {{- $router -}} } or warmfront_worker_tls_certificate_expiry_timestamp_seconds{ {{- $worker -}} }) - time() < 7 * 86400
  for: 1h
  annotations:
    summary: A certificate ends within a week.
    description: "{{ `{{ $labels.pod }}` }} ({{ `{{ $labels.certificate }}` }}): {{ `{{ $value | humanizeDuration }}` }} are left. A new one is taken over without a restart."
{{- end -}}
