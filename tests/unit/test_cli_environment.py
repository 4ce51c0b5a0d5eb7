"""Messages and skipped steps of `make` while it sets up environments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from requirements import environment
from requirements.environment import Environment, NotOffered, Stamps, Stop, check_machine, digest_of, pip_failure
from tests.harness.limits import HANG_S

ROOT = Path(environment.__file__).parent.parent
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize(
    ("log", "words", "kind"),
    [
        ("WARNING: Retrying ... NewConnectionError(...)\nERROR: No matching distribution found for x", "network", Stop),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "do not offer x for Python", NotOffered),
        ("OSError: [Errno 28] No space left on device", "disk is full", Stop),
        ("error: THESE PACKAGES DO NOT MATCH THE HASHES", "THESE PACKAGES DO NOT MATCH THE HASHES", Stop),
    ],
)
def test_pips_failure_becomes_a_sentence(tmp_path: Path, log: str, words: str, kind: type[Stop]) -> None:
    (tmp_path / "log").write_text(log)
    error = pip_failure("x", tmp_path / "log")
    assert type(error) is kind
    assert words in str(error)


def test_a_missing_compiler_is_named_with_its_remedy() -> None:
    with pytest.raises(Stop, match=r"no C\+\+ compiler \(no-such-compiler\).*apt install g\+\+"):
        check_machine({"CXX": "no-such-compiler -O2"})


def test_an_old_python_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    with pytest.raises(Stop, match=r"is 3\.9; name one: make PYTHON="):
        check_machine({})


def test_stamps_remember_and_survive_damage(tmp_path: Path) -> None:
    stamps = Stamps(tmp_path)
    assert not stamps.holds("core", "a")
    stamps.record("core", "a")
    assert Stamps(tmp_path).holds("core", "a")
    assert not Stamps(tmp_path).holds("core", "b")
    (tmp_path / "baton-stamps.json").write_text("{")
    assert not Stamps(tmp_path).holds("core", "a"), "an unreadable stamp means: do it again"


def test_digests_see_names_contents_and_borders() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of(LOCKS[0]) == digest_of(LOCKS[0]) != digest_of(LOCKS[1])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_locks_name_versions_and_hashes_but_no_address(lock: Path) -> None:
    requirements = lock.read_text().replace("\\\n", " ").splitlines()
    assert requirements
    for requirement in requirements:
        assert "==" in requirement.split(";")[0]
        assert "--hash=sha256:" in requirement
        assert "://" not in requirement
        assert "--index-url" not in requirement


def test_an_active_environment_is_kept_and_could_replace_itself(tmp_path: Path) -> None:
    """`make` may run with the project's own environment first on PATH."""
    program = (
        "import sys; from pathlib import Path; from requirements.environment import *\n"
        "print(base_python(), Environment(Path(sys.argv[1]), {}).digest())"
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    command = [str(tmp_path / "bin" / "python"), "-c", program, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    python, digest = answer.stdout.split()
    assert not Path(python).is_relative_to(tmp_path)
    assert digest == Environment(tmp_path, {}).digest()


def test_wrong_use_is_told_on_the_command_line() -> None:
    command = [sys.executable, str(ROOT / "requirements" / "environment.py")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert answer.returncode == 1
    assert answer.stderr == "baton: usage: environment.py FOLDER LOCK…\n"
