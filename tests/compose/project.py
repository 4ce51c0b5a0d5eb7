"""One run of compose.yaml under a name and a port of its own, and what tests do to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cli.servers import free_port
from requirements.environment import TORCH

ROOT = Path(__file__).parent.parent.parent
STAND_INS = Path(__file__).parent / "stand_ins.sh"
BASE_IMAGE = "python:3.11-slim-bookworm"
SETTINGS = {*re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M)} - {"WHEELS", "TORCH_INDEX_URL"}
HEALTHY_TIMEOUT_S = 120.0
READ_METRICS = (
    "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9000/metrics', timeout=3).read().decode())"
)


def docker(*arguments: str, timeout_s: float = 60.0, environ: Mapping[str, str | None] | None = None) -> str:
    """Run docker and return what it prints; None takes a variable away. Raises RuntimeError with its words."""
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env={name: value for name, value in {**os.environ, **(environ or {})}.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"docker {' '.join(arguments)}: status {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}"
        )
    return done.stdout.strip()


def why_not() -> str:
    """Return what is missing for these tests, one sentence; empty: nothing."""
    if shutil.which("docker") is None:
        return "these tests need Docker Engine 25 or newer, with the compose and buildx plug-ins: there is no `docker`"
    for command, what in (
        (("version",), "a Docker engine that answers (DOCKER_HOST)"),
        (("compose", "version"), "Docker's compose plug-in, 2.26 or newer"),
        (("buildx", "version"), "Docker's buildx plug-in"),
    ):
        try:
            docker(*command)
        except RuntimeError as error:
            return f"these tests need {what}: {str(error).splitlines()[-1]}"
    return ""


def make_images_available(images: list[str]) -> None:
    """Pull the public images that are not here; where no registry can be reached, make stand-ins."""
    for image in (BASE_IMAGE, *images):
        for command in (("image", "inspect", image), ("pull", "-q", image)):
            try:
                docker(*command, timeout_s=600.0)
                break
            except RuntimeError:
                continue
        else:
            subprocess.run([str(STAND_INS), image], check=True, timeout=600.0)


def torch_wheel() -> Path:
    """Return a folder with torch's wheel as pip finds it here: a build does not see this machine's sources."""
    folder = ROOT / ".cache" / "wheels"
    if not list(folder.glob("torch-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), TORCH]
        subprocess.run(command, cwd=ROOT, check=True, timeout=900.0)
    return folder


@dataclass(frozen=True, kw_only=True)
class Project:
    name: str
    settings: Mapping[str, str]
    """compose.yaml's variables."""
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments: str, timeout_s: float = 120.0) -> str:
        # Settings come from here alone: not from .env, and not from the shell or make, save where a build finds wheels.
        named = {"PORT": str(self.port), "COMPOSE_PROJECT_NAME": self.name}
        environ = {**dict.fromkeys(SETTINGS, None), **self.settings, **named}
        return docker("compose", "--env-file", os.devnull, *arguments, timeout_s=timeout_s, environ=environ)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        return json.loads(docker("inspect", container))[0]

    def metric(self, container: str, name: str) -> float:
        text = docker("exec", container, "python", "-ISc", READ_METRICS)
        return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + " "))

    def kill(self, container: str) -> None:
        """Kill the container's first process, from outside: Docker takes that for a crash and starts it again."""
        os.kill(self.inspect(container)["State"]["Pid"], signal.SIGKILL)

    def wait_until(self, condition: Callable[[], object], what: str, *, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        give_up_at_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > give_up_at_s:
                raise TimeoutError(f"{what}, even after {timeout_s:g} s:\n{self.compose('ps', '-a')}")
            time.sleep(0.2)

    def wait_healthy(self, container: str) -> None:
        def healthy() -> bool:
            return self.inspect(container)["State"].get("Health", {}).get("Status") == "healthy"

        self.wait_until(healthy, f"{container} is not healthy")

    def left_over(self) -> dict[str, list[str]]:
        """Return what of this project exists, by kind."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds = {"container": ("ps", "-aq"), "volume": ("volume", "ls", "-q"), "network": ("network", "ls", "-q")}
        found = {kind: docker(*command, "--filter", label).split() for kind, command in kinds.items()}
        return {kind: ids for kind, ids in found.items() if ids}


@contextmanager
def running(project: Project, *, scale: Mapping[str, int], timeout_s: float) -> Generator[Project]:
    """Build and start all of it, wait until it is healthy, and leave nothing behind."""
    wanted = project.compose("config", "--images").split()
    make_images_available([image for image in wanted if not image.startswith("baton-")])
    counts = [part for service, count in scale.items() for part in ("--scale", f"{service}={count}")]
    began_s = time.monotonic()
    try:
        project.compose("up", "-d", "--build", "--wait", *counts, timeout_s=timeout_s)
        print(f"\n{project.name}: built and healthy after {time.monotonic() - began_s:.0f} s")
        yield project
    except BaseException:
        print(project.compose("ps", "-a"), project.compose("logs", "--tail", "30"), sep="\n")
        raise
    finally:
        project.compose("down", "-v", "-t", "10", timeout_s=300.0)
        left = project.left_over()
        assert not left, f"`down -v` left {left}"
