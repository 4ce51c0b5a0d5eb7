"""A real Prometheus for tests, with this repository's rules, scraping whatever the test names."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers import Server, free_port, running

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian, Ubuntu: apt install prometheus)",
)


def promtool(*arguments: str) -> str:
    """Run promtool and return what it says; AssertionError where it objects."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"promtool {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stdout


class Prometheus:
    def __init__(self, url: str, targets: Path) -> None:
        self._api = httpx.AsyncClient(base_url=f"{url}/api/v1/", timeout=10.0)
        self._targets = targets

    def scrape(self, addresses: Mapping[str, list[str]]) -> None:
        """Scrape these from now on: job → host and port of each of its processes."""
        groups = [{"targets": targets, "labels": {"job": job}} for job, targets in addresses.items()]
        fresh = self._targets.with_suffix(".new")
        fresh.write_text(json.dumps(groups))
        fresh.replace(self._targets)

    async def until_scraped(self, processes: int) -> None:
        async with asyncio.timeout(15):
            while True:
                up = (await self.ask("query", query="sum(up)"))["result"]
                if up and int(up[0]["value"][1]) == processes:
                    return
                await asyncio.sleep(0.1)

    async def ask(self, path: str, **parameters: str | float) -> Any:
        answer = (await self._api.post(path, data={name: str(value) for name, value in parameters.items()})).json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    async def values(self, expression: str, *, since_s: float, until_s: float) -> list[float]:
        """Return every figure that the expression gave between two instants, of all its series."""
        data = await self.ask("query_range", query=expression, start=since_s, end=until_s, step=1)
        figures = [float(value) for series in data["result"] for _, value in series["values"]]
        return [figure for figure in figures if not math.isnan(figure)]

    async def close(self) -> None:
        await self._api.aclose()


@contextmanager
def start_prometheus(folder: Path) -> Generator[Prometheus]:
    """Run Prometheus, which scrapes each second."""
    port, targets = free_port(), folder / "targets.json"
    targets.write_text("[]")
    scraping = {"job_name": "baton", "file_sd_configs": [{"files": [str(targets)]}]}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scraping],
    }
    # JSON is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    command = [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=warn"),
    ]
    server = Server("http", command, port, folder, b"GET /-/ready HTTP/1.0\r\n\r\n", b"200 OK")
    with running(server):
        yield Prometheus(server.url, targets)
