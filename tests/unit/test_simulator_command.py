"""`baton replay`, as the command line gives it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from baton.cli.commands import find_commands
from baton.cli.main import run
from baton.errors import BatonError, ConfigurationError, InvalidRequest


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the entry point, as the project's metadata does."""
    folder = tmp_path / "site" / "simulator-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: simulator\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[baton.commands]\nreplay = baton_simulator.command\n")
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [
        {"timestamp": 1000 * n, "input_length": 600 + n, "output_length": 20, "hash_ids": [0, n + 1]} for n in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_the_command_is_found_by_its_entry_point() -> None:
    assert list(find_commands()) == ["keys", "replay"]


def test_it_prints_one_row_per_policy(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["replay", trace, "--prefill", "1", "--decode", "2", "--policy", "baton,round-robin"], {})
    out, err = capsys.readouterr()
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [f"{trace},", "policy", "baton", "round-robin"]
    assert out.startswith(f"{trace}, 1 prefill + 2 decode workers, recorded times, 40 requests")
    assert "round-robin: 40 of 40 requests" in err


def test_json_is_the_same_for_the_same_arguments(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", trace, "--workers", "2", "--load", "0.9", "--copies", "3", "--json", "--steps", "rough"]
    texts: list[str] = []
    for _ in range(2):
        run(arguments, {})
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    summary = json.loads(texts[0])["policies"]["baton"]
    assert (summary["requests"], summary["refused"]) == (108, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "bst"], "there is no policy 'bst': name some of baton, "),
        (["--policy", ""], "there is no policy ''"),
        (["--load", "0"], "--load is 0, which is not between 0 and 100"),
        (["--load", "nan"], "--load is nan"),
        (["--copies", "0"], "--copies is 0, which is not between 1 and 1000"),
        (["--workers", "-1"], "--workers is -1"),
        (["--workers", "0"], "--workers is 0, which is not between 1 and 10000"),
        (["--workers", "1000000"], "--workers is 1e\\+06, which is not between 1 and 10000"),
        (["--prefill", "0", "--decode", "0"], "--prefill is 0, which is not between 1 and 10000"),
        (["--prefill", "2"], "--prefill and --decode belong together"),
        (["--workers", "2", "--prefill", "2", "--decode", "2"], "--workers serve aggregated"),
    ],
)
def test_impossible_arguments_are_refused(flags: list[str], message: str, trace: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(["replay", trace, *flags], {})


def test_a_part_without_requests_is_refused(trace: str) -> None:
    with pytest.raises(InvalidRequest, match="the held-out part has no requests"):
        run(["replay", trace, "--part", "held-out"], {})


def test_plots_and_the_page_are_written(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "results"
    run(["replay", trace, "--policy", "baton,round-robin", "--out", str(folder)], {})
    assert sorted(path.name for path in folder.iterdir()) == [
        "goodput.png", "replay.html", "replay.json", "tpot.png", "ttft.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    page = (folder / "replay.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "<td>round-robin</td>" in page
    assert set(json.loads((folder / "replay.json").read_text())["policies"]) == {"baton", "round-robin"}


def test_a_folder_that_cannot_be_made_is_named_before_the_replay(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"--out .*file/results: .*Not a directory"):
        run(["replay", trace, "--out", str(tmp_path / "file" / "results")], {})
    assert capsys.readouterr().err == "", "the replay ran, and its result was lost"


def test_without_matplotlib_the_fix_is_named_before_the_replay(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BatonError, match="matplotlib, which is not installed: pip install matplotlib"):
        run(["replay", trace, "--out", str(tmp_path)], {})
    assert capsys.readouterr().err == ""
