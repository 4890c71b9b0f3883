"""Alerts, dashboard and scaling ask for what routers and workers really export, in PromQL that parses."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest

from router.errors import HTTP_STATUS
from router.metrics import RouterMetrics
from tests.helm.tools import Helm, Objects, one
from warmfront.controller import ControllerMetrics
from worker.metrics import WorkerMetrics
from worker.request import EngineSnapshot


def exported() -> dict[str, set[str]]:
    """Names of the series on /metrics, with the labels of their family."""
    found: dict[str, set[str]] = {}
    registries = (RouterMetrics().registry, WorkerMetrics(view=EngineSnapshot, now=0.0).registry)
    for registry in (*registries, ControllerMetrics().registry):
        for collector in set(registry._collector_to_names):
            for family in collector.collect():
                labels = set(getattr(collector, "_labelnames", ())) | {k for s in family.samples for k in s.labels}
                ends = {
                    "counter": ["_total"],
                    "histogram": ["_bucket", "_sum", "_count"],
                    "summary": ["_sum", "_count"],
                }
                for end in ends.get(family.type, [""]):
                    found[family.name + end] = labels | {"le"} if end == "_bucket" else labels
    return found


def alerts(objects: Objects) -> list[dict[str, Any]]:
    return [rule for group in one(objects, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]


@pytest.fixture(scope="session")
def queries(scenarios: dict[str, Objects]) -> dict[str, str]:
    """Every expression of the production scenario, by where it stands."""
    objects = scenarios["production"]
    found = {rule["alert"]: rule["expr"] for rule in alerts(objects)}
    (text,) = one(objects, "ConfigMap", "-dashboard")["data"].values()
    for panel in json.loads(text)["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    found["keda"] = one(objects, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    return found


def test_every_query_parses(queries: dict[str, str]) -> None:
    for where, query in queries.items():
        try:
            promql_parser.parse(query.replace("$__rate_interval", "1m"))
        except ValueError as error:
            raise AssertionError(f"{where}: {error}: {query}") from error


def test_every_series_is_one_that_the_program_exports(queries: dict[str, str]) -> None:
    known = exported()
    for where, query in queries.items():
        names = re.findall(r"\bwarmfront_(?:router|worker|controller)_\w+", query)
        assert names, where
        assert set(names) <= set(known), where
        for name, matchers in re.findall(r"\b(warmfront_\w+)\{([^}]*)\}", query):
            labels = set(re.findall(r"(\w+)\s*(?:=|!)", matchers)) - {"namespace", "pod"}
            assert labels <= known[name], where
        grouped = {label for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(", ")}
        assert grouped - {"pod"} <= set().union(*(known[name] for name in names)), where


def test_every_query_is_of_this_namespace_and_release(queries: dict[str, str]) -> None:
    for where, query in queries.items():
        for matchers in re.findall(r"\{([^}]*)\}", query):
            assert re.search(r'namespace="default", pod=~"wf-warmfront-(router|worker|head)-\.\+"', matchers), where


def test_what_routers_scale_on_is_exported(scenarios: dict[str, Objects]) -> None:
    metrics = one(scenarios["production"], "HorizontalPodAutoscaler")["spec"]["metrics"]
    named = {item["pods"]["metric"]["name"] for item in metrics if item["type"] == "Pods"}
    assert named
    assert {f"{name}_total" for name in named} <= set(exported()), "prometheus-adapter leaves out the end of a counter"


def test_two_releases_have_a_dashboard_each(helm: Helm) -> None:
    made = []
    for release, namespace in (("a", "one"), ("b", "one"), ("a", "two")):
        objects = helm.template("--set", "metrics.dashboard.enabled=true", release=release, namespace=namespace)
        (text,) = one(objects, "ConfigMap", "-dashboard")["data"].values()
        assert "@" not in text
        board = json.loads(text)
        assert len(board["uid"]) <= 40, "Grafana's limit"
        made.append((board["uid"], board["title"]))
    assert [len({board[number] for board in made}) for number in (0, 1)] == [3, 3]


def test_the_hit_rate_leaves_out_the_first_minute_of_a_pod(scenarios: dict[str, Objects]) -> None:
    (low,) = [rule for rule in alerts(scenarios["production"]) if rule["alert"] == "WarmfrontHitRateLow"]
    windows = set(re.findall(r"\[(\d+)m\]", low["expr"]))
    offsets = set(re.findall(r"offset (\d+)m", low["expr"]))
    assert (windows, offsets) == ({"10"}, {"11"})


def test_alerts_say_what_it_is_and_carry_the_labels_asked_for(helm: Helm) -> None:
    objects = helm.template("--set", "metrics.prometheusRule.enabled=true,metrics.prometheusRule.alertLabels.team=llm")
    for rule in alerts(objects):
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["team"] == "llm"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_thresholds_come_from_values(helm: Helm) -> None:
    objects = helm.template("--set", "metrics.prometheusRule.enabled=true,metrics.prometheusRule.lowHitRate=0.55")
    assert [rule for rule in alerts(objects) if rule["expr"].endswith("< 0.55")]


def test_every_status_that_is_not_the_client_s_doing_is_watched(scenarios: dict[str, Objects]) -> None:
    watched: set[str] = set()
    for rule in alerts(scenarios["production"]):
        for codes in re.findall(r'code=~?"([^"]+)"', rule["expr"]):
            watched |= set(codes.split("|"))
    assert {status for status, (code, _) in HTTP_STATUS.items() if code >= 500 or code == 429} <= watched


def test_whoever_is_gone_altogether_is_missed(scenarios: dict[str, Objects]) -> None:
    rules = alerts(scenarios["production"])
    missed = {
        m[1]: rule for rule in rules if (m := re.match(r"absent\(warmfront_(\w+?)_\w+\{[^}]*\}\)$", rule["expr"]))
    }
    assert set(missed) == {"router", "controller"}, "without series a comparison never holds"
    assert missed["router"]["labels"]["severity"] == "critical"


def test_the_more_is_shed_the_louder(helm: Helm) -> None:
    objects = helm.template("--set", "metrics.prometheusRule.enabled=true,metrics.prometheusRule.shedShare=0.2")
    shed = [rule for rule in alerts(objects) if 'code="RESOURCE_EXHAUSTED"' in rule["expr"]]
    found = {float(rule["expr"].rpartition(" > ")[2]): rule["labels"]["severity"] for rule in shed}
    assert found == {0.2: "warning", 0.5: "critical"}


def test_monitors_scrape_ports_that_exist(scenarios: dict[str, Objects]) -> None:
    objects = scenarios["production"]
    for name, service_name in (("-router", "-headless"), ("-head", "-head")):
        service, monitor = one(objects, "Service", service_name), one(objects, "ServiceMonitor", name)["spec"]
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert {end["port"] for end in monitor["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    pods = one(objects, "Deployment", "-worker")["spec"]["template"]
    monitor = one(objects, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    names = {port["name"] for port in pods["spec"]["containers"][0]["ports"]}
    assert {end["port"] for end in monitor["podMetricsEndpoints"]} <= names


def test_only_one_service_is_scraped(scenarios: dict[str, Objects]) -> None:
    services = [item for item in scenarios["production"] if item["kind"] == "Service"]
    assert [item["metadata"]["name"] for item in services if "warmfront/metrics" in item["metadata"]["labels"]] == [
        "wf-warmfront-router-headless"
    ]
