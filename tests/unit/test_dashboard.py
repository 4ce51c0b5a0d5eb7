"""The dashboard as far as it can be checked without Grafana: its model, its data sources, its figures, its links."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from baton.telemetry import catalogue
from deploy.grafana import make_dashboard
from tests.harness.servers import DEPLOY, RULES

GRAFANA = DEPLOY / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "baton.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SOURCES: list[dict[str, Any]] = yaml.safe_load(
    (GRAFANA / "provisioning" / "datasources" / "datasources.yaml").read_text()
)["datasources"]
TYPES = {source["uid"]: source["type"] for source in SOURCES}
COMPOSE = DEPLOY.parent / "compose.yaml"


def test_it_is_what_its_panels_make() -> None:
    assert (GRAFANA / "dashboards" / "baton.json").read_text() == make_dashboard.dashboard(), (
        "run python deploy/grafana/make_dashboard.py"
    )


def test_panels_have_a_place_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= make_dashboard.WIDTH
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)


def test_every_data_source_is_provisioned() -> None:
    used = [
        each["datasource"] for panel in PANELS for each in (panel, *panel.get("targets", [])) if "datasource" in each
    ]
    assert used
    assert all(TYPES[source["uid"]] == source["type"] for source in used)
    (prometheus,) = (source for source in SOURCES if source["type"] == "prometheus")
    (pointer,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert TYPES[pointer["datasourceUid"]] == "jaeger"
    assert pointer["name"] == "trace_id"


def test_every_panel_says_what_it_shows_and_leads_to_traces() -> None:
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [target["refId"] for target in panel["targets"]] == sorted({t["refId"] for t in panel["targets"]})
        links: list[dict[str, str]] = panel["links"] + panel["fieldConfig"]["defaults"]["links"]
        for link in links:
            (panes,) = parse_qs(urlsplit(link["url"]).query)["panes"]
            (pane,) = json.loads(panes).values()
            assert TYPES[pane["datasource"]] == "jaeger"
            assert pane["range"] == {"from": "${__from}", "to": "${__to}"}
            assert pane["queries"][0]["service"].removeprefix("baton-") in catalogue.EVERYONE
        assert all(target["exemplar"] for target in panel["targets"] if "histogram_quantile" in target["expr"])


def test_every_figure_is_declared() -> None:
    """The rules are checked too, and an expression's labels must be labels of the metric, or Prometheus' own."""
    rows = {row.name: row for service in catalogue.EVERYONE for row in catalogue.rows_of(service)}
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    known = rows.keys() | {rule["record"] for rule in rules if "record" in rule}
    shown = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
    for expression in (*shown, *(rule["expr"] for rule in rules)):
        names = set(re.findall(r"\b(?:baton|gen_ai)[a-z0-9_:]*", re.sub(r"\{[^}]*\}|by \([^)]*\)", "", expression)))
        assert names or expression == "vector(0)" or "process_" in expression
        for name in names:
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            assert name in known or (base in rows and rows[base].kind is catalogue.Kind.HISTOGRAM), expression
        for metric, selector in re.findall(r"\b((?:baton|gen_ai)[a-z0-9_]*)\{([^}]*)\}", expression):
            row = rows[re.sub(r"_(bucket|count|sum)$", "", metric)]
            for label in re.findall(r"(\w+)(?:=|!)", selector):
                assert label in row.labels, expression


def test_it_scrapes_the_ports_that_compose_opens() -> None:
    """Every service of ours that is scraped has its status on that port there."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert set(discovery["names"]) == set(catalogue.EVERYONE)
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in discovery["names"]:
        assert f"--status-port={discovery['port']}" in services[name]["command"]
