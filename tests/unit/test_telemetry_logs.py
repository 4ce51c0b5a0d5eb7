"""Logs of services: their form and their level."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator

import pytest

from baton.engines.sglang.host import keeping_logs
from baton.telemetry.logs import LogFormat, LogLevel, configure_logs


@pytest.fixture(autouse=True)
def _restored() -> Generator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        # Reconfiguring closes the handlers that it replaces: those of pytest are needed on.
        root.removeHandler(handler)
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)


def test_each_line_of_json_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogLevel.INFO, LogFormat.JSON)
    log = logging.getLogger("baton.test")
    log.info("two\nlines, and a path: %s", "a\udcff")
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("it failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == (
        "info",
        "baton.test",
        "two\nlines, and a path: a\udcff",
    )
    assert first["time"].endswith("+00:00")
    assert "exception" not in first
    assert second["exception"].splitlines()[-1] == "ValueError: wrong"


def test_messages_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogLevel.WARNING)
    logging.getLogger("baton.test").info("quiet")
    logging.getLogger("baton.test").warning("loud")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING baton.test: loud")


def test_an_engine_in_the_same_process_changes_neither_form_nor_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogLevel.INFO, LogFormat.JSON)
    with keeping_logs():
        logging.basicConfig(level=logging.WARNING, format="[%(asctime)s] %(message)s", force=True)  # As SGLang does.
    logging.getLogger("baton.test").info("ready")
    logging.getLogger("sglang.srt").info("quiet")
    logging.getLogger("sglang.srt").warning("loud")
    logging.getLogger("sglang").setLevel(logging.NOTSET)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["ready", "loud"]
