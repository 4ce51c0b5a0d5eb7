"""Settings of both deployables: loaded as a user gives them."""

from __future__ import annotations

import re
import socket
import sys

import pytest
from baton_decode.config import DecodeSettings
from baton_prefill.config import PrefillSettings

from baton import config
from baton.errors import ConfigurationError
from baton.messages.workers import Role
from baton.transfer import AgentOptions, TransferFaults
from baton.worker.settings import WorkerSettings, create_engine

BOTH = pytest.mark.parametrize(("service", "kind"), [("prefill", PrefillSettings), ("decode", DecodeSettings)])


@BOTH
def test_defaults_are_the_agents_defaults(service: str, kind: type[WorkerSettings]) -> None:
    settings = config.load(kind, service=service, argv=[], environ={})
    assert settings.agent_options() == AgentOptions()
    assert settings.engine == "vllm"


@BOTH
def test_every_flag_has_a_description(
    service: str, kind: type[WorkerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        config.load(kind, service=service, argv=["--help"], environ={})
    text = capsys.readouterr().out
    for flag in ("--nats-url", "--model-name", "--engine-options", "--slots", "--heartbeat-s", "--device", "--faults"):
        assert flag in text


def test_a_full_command_line() -> None:
    settings = config.load(
        DecodeSettings,
        service="decode",
        argv=[
            *("--worker", "d7", "--model", "/models/Some-Model", "--engine", "simulated"),
            *("--engine-options", '{"blocks": 64, "speed": 2.5}', "--faults", '{"delay_s": 0.2, "corrupt_every": 3}'),
            *("--agent-backends", "tcp", "--lease-ttl-s", "2"),
        ],
        environ={"BATON_DECODE_AGENT_SECRET": "hush"},
    )
    assert settings.engine_options == {"blocks": 64, "speed": 2.5}
    assert (settings.worker_id(Role.DECODE), settings.public_model_name()) == ("d7", "Some-Model")
    options = settings.agent_options()
    assert (options.secret, options.backends, options.lease_ttl_s) == ("hush", ("tcp",), 2.0)
    assert options.faults == TransferFaults(delay_s=0.2, corrupt_every=3)


def test_the_agent_of_a_container_listens_where_its_name_leads() -> None:
    assert DecodeSettings(agent_host="auto").agent_options().host == socket.gethostname()


def test_a_worker_without_a_name_gets_one_that_is_a_subject_part() -> None:
    assert re.fullmatch(r"prefill-[A-Za-z0-9_-]+-\d+", PrefillSettings().worker_id(Role.PREFILL))


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--worker", "a.b"], "worker"),
        (["--engine", "other"], "engine"),
        (["--faults", '{"delay": 1}'], "faults is malformed.*`delay`"),
        (["--faults", '{"corrupt_every": 1.5}'], "corrupt_every"),
        (["--faults", '{"corruption": "swap"}'], "corruption"),
        (["--leased-share", "2"], "leased-share"),
        (["--block-tokens", "8"], "block-tokens"),
        (["--engine-options", "[1]"], "engine-options"),
        (["--heartbeats", "1"], "did you mean --heartbeat-s"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_is_named(argv: list[str], names: str) -> None:
    with pytest.raises(ConfigurationError, match=names):
        config.load(PrefillSettings, service="prefill", argv=argv, environ={})


def test_an_engine_without_ranks_says_so() -> None:
    settings = config.load(
        PrefillSettings, service="prefill", argv=["--engine", "simulated", "--tensor-parallel", "2"], environ={}
    )
    with pytest.raises(ConfigurationError, match="one rank"):
        create_engine(Role.PREFILL, settings)


def test_a_wrong_engine_option_is_named() -> None:
    settings = WorkerSettings(model="m", engine="simulated", engine_options={"colour": 1})
    with pytest.raises(ConfigurationError, match="colour"):
        create_engine(Role.PREFILL, settings)


@BOTH
def test_a_worker_finds_its_file_by_its_name_or_role(service: str, kind: type[WorkerSettings]) -> None:
    def options(*argv: str) -> dict[str, object]:
        return config.load(kind, service=service, argv=list(argv), environ={}).file_options(Role(service))

    sized = ("--kv-folder", "/kv", "--kv-file-bytes", "4096")
    assert options() == options(*sized[:2]) == options(*sized[2:]) == {}
    assert options(*sized) == {"kv_file": f"/kv/{service}.kv", "kv_file_bytes": 4096}
    assert options(*sized, "--worker", "w-7")["kv_file"] == "/kv/w-7.kv"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_named(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"baton.engines.{engine}.engine"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)  # One of the packages that only engines need.
    monkeypatch.delitem(sys.modules, "baton.engines.kv_events", raising=False)
    settings = config.load(PrefillSettings, service="prefill", argv=["--model", "m", "--engine", engine], environ={})
    with pytest.raises(ConfigurationError, match=f"Baton's extra `{engine}` installs it"):
        create_engine(Role.PREFILL, settings)
