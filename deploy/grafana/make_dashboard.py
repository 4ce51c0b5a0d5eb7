"""Makes the dashboard, `dashboards/baton.json`, from `panels.yaml`: `python deploy/grafana/make_dashboard.py`.

Points on panels of histograms lead to the trace they were measured on (exemplars); every panel's link leads to the
traces of the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml

PANELS: Final = Path(__file__).parent / "panels.yaml"
OUT: Final = Path(__file__).parent / "dashboards" / "baton.json"
PROMETHEUS: Final = {"type": "prometheus", "uid": "prometheus"}
JAEGER_UID: Final = "jaeger"
WIDTH: Final = 24
SIZES: Final = {"stat": (4, 4), "timeseries": (8, 7)}
"""Width and height of each kind of panel."""


def expressions(panel: dict[str, Any]) -> dict[str, str]:
    """Return a panel's expressions, by legend."""
    if (show := panel.get("show")) is not None:
        return {"__auto": show} if isinstance(show, str) else show
    by = panel.get("by", "")
    groups, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    rates = f"sum by ({groups}) (rate({panel['quantiles']}_bucket[$__rate_interval]))"
    return {f"p{share * 100:g}{legend}": f"histogram_quantile({share:g}, {rates})" for share in (0.5, 0.95, 0.99)}


def traces_link(panel: dict[str, Any]) -> dict[str, Any]:
    failed = panel.get("failed", False)
    query = {"refId": "A", "queryType": "search", "service": f"baton-{panel.get('service', 'gateway')}"}
    if failed:
        query["tags"] = "error=true"
    pane = {"datasource": JAEGER_UID, "queries": [query], "range": {"from": "${__from}", "to": "${__to}"}}
    # Grafana replaces its variables by the panel's time, so they must stay as they are.
    panes = quote(json.dumps({"traces": pane}, separators=(",", ":")), safe="${}_")
    title = "Failed traces of this time" if failed else "Traces of this time"
    return {"title": title, "url": f"/explore?schemaVersion=1&orgId=1&panes={panes}", "targetBlank": True}


def thresholds(steps: list[float]) -> dict[str, Any]:
    colours = ["green", "yellow", "red"] if steps == sorted(steps) else ["red", "yellow", "green"]
    values = [None, *sorted(steps)]
    return {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in zip(colours, values, strict=False)]}


def render(panel: dict[str, Any], number: int, x: int, y: int) -> dict[str, Any]:
    kind, link = panel.get("kind", "timeseries"), traces_link(panel)
    width, height = SIZES[kind]
    defaults = {"unit": panel["unit"], "min": 0, "thresholds": thresholds(panel.get("steps", [])), "links": [link]}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    if kind == "timeseries":
        stacking = {"stacking": {"mode": "normal", "group": "A"}} if panel.get("stacked") else {}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 30 if stacking else 8, "showPoints": "never", **stacking}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel["about"],
        "datasource": PROMETHEUS,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "links": [link],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": PROMETHEUS,
                "expr": expression,
                "legendFormat": legend,
                "exemplar": "_bucket" in expression,
                "range": True,
            }
            for index, (legend, expression) in enumerate(expressions(panel).items())
        ],
    }


def lay_out(rows: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield rows and their panels, from left to right and from top to bottom."""
    numbers, y = count(1), 0
    for title, panels in rows.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": next(numbers), "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x == WIDTH:
                x, y = 0, y + height
            drawn = render(panel, next(numbers), x, y)
            x, height = x + drawn["gridPos"]["w"], drawn["gridPos"]["h"]
            yield drawn
        y += height


def dashboard() -> str:
    """Return the dashboard's JSON."""
    model: dict[str, Any] = {
        "uid": "baton",
        "title": "Baton",
        "description": "Made by deploy/grafana/make_dashboard.py. What the figures mean: docs/metrics.md.",
        "tags": ["baton"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": []},
        "links": [],
        "panels": list(lay_out(yaml.safe_load(PANELS.read_text()))),
    }
    return json.dumps(model, indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(dashboard())
