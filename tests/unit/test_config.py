"""Settings: their sources, the precedence of sources, and errors that stop the start."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from baton import config
from baton.errors import ConfigurationError


class Engine(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    nats_url: Annotated[str, msgspec.Meta(description="Where the message bus is.")] = "nats://127.0.0.1:4222"
    port: Annotated[int, msgspec.Meta(description="Port to listen on.", ge=0, le=65535)] = 8000
    heartbeat_interval_s: Annotated[float, msgspec.Meta(description="Time between heartbeats.", gt=0)] = 0.25
    verbose: Annotated[bool, msgspec.Meta(description="Log everything.")] = False
    engine: Annotated[Engine, msgspec.Meta(description="Which engine.")] = Engine.VLLM
    device: Annotated[Literal["auto", "cpu"], msgspec.Meta(description="Where it runs.")] = "auto"
    model: Annotated[Path | None, msgspec.Meta(description="Folder of the model.")] = None
    seed: Annotated[int | None, msgspec.Meta(description="Seed.")] = None
    engine_options: Annotated[dict[str, object], msgspec.Meta(description="Passed on.")] = {}
    names: Annotated[tuple[str, ...], msgspec.Meta(description="Names.")] = ()


class Required(msgspec.Struct, frozen=True, kw_only=True):
    worker: Annotated[str, msgspec.Meta(description="Name of this worker.")]


def load(*argv: str, **environ: str) -> Settings:
    variables = {f"BATON_GATEWAY_{key}": value for key, value in environ.items()}
    return config.load(Settings, service="gateway", argv=argv, environ=variables | {"HOME": "/", "BATON_OTHER_X": "1"})


def test_defaults() -> None:
    assert load() == Settings()


def test_flags_beat_variables_beat_the_file_beat_defaults(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('nats_url = "file"\nport = 1\nseed = 1\n')
    settings = load("--config", str(file), "--nats-url", "flag", NATS_URL="variable", PORT="2")
    assert (settings.nats_url, settings.port, settings.seed) == ("flag", 2, 1)
    assert settings.heartbeat_interval_s == 0.25
    assert load(CONFIG=str(file)).nats_url == "file"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--port=9"], "port", 9),
        (["--port", "9"], "port", 9),
        (["--port", "1", "--port", "9"], "port", 9),
        (["--heartbeat-interval-s", "2"], "heartbeat_interval_s", 2.0),
        (["--verbose"], "verbose", True),
        (["--verbose", "--port", "9"], "verbose", True),
        (["--verbose", "true"], "verbose", True),
        (["--verbose=false"], "verbose", False),
        (["--no-verbose"], "verbose", False),
        (["--engine", "simulated"], "engine", Engine.SIMULATED),
        (["--model", "/a/b"], "model", Path("/a/b")),
        (["--seed", "-5"], "seed", -5),
        (["--nats-url", "5"], "nats_url", "5"),
        (["--nats-url="], "nats_url", ""),
        (["--nats_url", "x"], "nats_url", "x"),
        (["--engine-options", '{"dtype": "float32", "n": [1]}'], "engine_options", {"dtype": "float32", "n": [1]}),
        (["--names", "a, b"], "names", ("a", "b")),
        (["--names", '["a,b"]'], "names", ("a,b",)),
        (["--names", ""], "names", ()),
    ],
)
def test_flags(argv: list[str], name: str, value: object) -> None:
    assert getattr(load(*argv), name) == value


def test_variables_and_files_take_every_type(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(
        'verbose = true\nheartbeat_interval_s = 1\nengine = "simulated"\nmodel = "/m"\nnames = ["x"]\n'
        '[engine_options]\ndtype = "float32"\n'
    )
    expected = Settings(
        verbose=True,
        heartbeat_interval_s=1.0,
        engine=Engine.SIMULATED,
        model=Path("/m"),
        names=("x",),
        engine_options={"dtype": "float32"},
    )
    assert load("--config", str(file)) == expected
    options = '{"dtype": "float32"}'
    assert expected == load(
        VERBOSE="1", HEARTBEAT_INTERVAL_S="1", ENGINE="simulated", MODEL="/m", NAMES="x", ENGINE_OPTIONS=options
    )


def test_an_empty_variable_is_not_set() -> None:
    assert load(PORT="", NATS_URL="") == Settings()


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--prt", "1"], {}, "--prt is unknown; did you mean --port?"),
        (["--zzzzzzzz"], {}, "--zzzzzzzz is unknown; --help"),
        (["stray"], {}, "stray"),
        (["-p", "1"], {}, "-p"),
        (["--port"], {}, "--port needs a value"),
        (["--port", "--verbose"], {}, "--port needs a value"),
        (["--port", "eighty"], {}, "--port is malformed"),
        (["--port", "70000"], {}, "--port is malformed"),
        (["--port", "1.5"], {}, "--port is malformed"),
        (["--no-port"], {}, "port"),
        (["--verbose=maybe"], {}, "--verbose is malformed"),
        (["--engine", "sglang"], {}, "--engine is malformed: Invalid enum value 'sglang'; choose one of vllm,"),
        (["--device", "gpu"], {}, "--device is malformed: Invalid enum value 'gpu'; choose one of auto, cpu"),
        (["--heartbeat-interval-s", "nan"], {}, "--heartbeat-interval-s is malformed"),
        (["--heartbeat-interval-s", "inf"], {}, "--heartbeat-interval-s is malformed"),
        (["--heartbeat-interval-s", "0"], {}, "--heartbeat-interval-s is malformed"),
        (["--engine-options", "{"], {}, "--engine-options is not JSON"),
        (["--engine-options", "[1]"], {}, "--engine-options is malformed"),
        (["--names", "[1]"], {}, "--names is malformed"),
        (["--names", " "], {}, "--names has only spaces and commas"),
        ([], {"NAMES": ", ,"}, "BATON_GATEWAY_NAMES has only spaces and commas"),
        ([], {"PORT": "x"}, "BATON_GATEWAY_PORT is malformed"),
        ([], {"NATS_URI": "x"}, "BATON_GATEWAY_NATS_URI is unknown; did you mean BATON_GATEWAY_NATS_URL?"),
        ([], {"SERVICE_HOST": "10.0.0.1"}, "BATON_GATEWAY_SERVICE_HOST is unknown"),
    ],
)
def test_what_is_unknown_or_malformed_is_named(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(*argv, **environ)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("prt = 1", "prt in"),
        ('port = "1"', "port in"),
        ("port = 70000", "port in"),
        ("heartbeat_interval_s = inf", "heartbeat_interval_s in"),
        ("port = ", "is not TOML"),
        ("[server]\nport = 1", "server in"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=str(file)) as raised:
        load("--config", str(file))
    assert named in str(raised.value)


def test_a_missing_file_and_a_file_that_is_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load("--config", str(tmp_path / "none.toml"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load("--config", str(tmp_path / "binary"))


def test_a_missing_setting_says_how_to_give_it() -> None:
    with pytest.raises(ConfigurationError, match="--worker or BATON_PREFILL_WORKER"):
        config.load(Required, service="prefill", argv=[], environ={})


def test_settings_that_do_not_fit_together() -> None:
    class Pair(msgspec.Struct, frozen=True, kw_only=True):
        low: int = 1
        high: int = 2

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError("low is above high")

    with pytest.raises(ConfigurationError, match="low is above high"):
        config.load(Pair, service="x", argv=["--low", "3"], environ={})


def test_help_lists_every_setting_with_default_and_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load("--port", "nonsense", "--help")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for text in (
        "--config FILE",
        "--nats-url TEXT\n      Where the message bus is. (default: nats://127.0.0.1:4222)",
        "--port N\n",
        "Time between heartbeats. (seconds, default: 0.25)",
        "--[no-]verbose\n",
        "(default: false)",
        "--engine vllm|simulated\n",
        "--model PATH\n      Folder of the model. (default: none)",
        "--engine-options JSON\n",
        "BATON_GATEWAY_CONFIG",
    ):
        assert text in shown
