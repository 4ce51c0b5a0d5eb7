"""The `baton` command: arguments in, exit status out."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypedDict

import msgspec

from baton.cli.asking import find_nats_url
from baton.cli.commands import Command, find_commands
from baton.cli.deployment import DRAIN_S, ENGINES, Deployment
from baton.cli.doctor import describe, examine
from baton.cli.explain import explain
from baton.cli.index import Question, index, parse_tokens
from baton.cli.roles import parse_wish, roles
from baton.cli.trace import trace
from baton.cli.up import up
from baton.cli.waterfall import Look
from baton.devices.survey import read_survey
from baton.engines.options import KV_POOL_AUTO, KvPath
from baton.errors import BatonError, ConfigurationError
from baton.messages.placement import Disaggregation
from baton.messages.workers import Role
from baton.processes.child import die_with_parent
from baton.stop import EXIT_FAILED, EXIT_MISCONFIGURED

EXIT_BROKEN_PIPE: Final = 128 + signal.SIGPIPE
"""Status that a shell shows for a program that SIGPIPE has ended."""
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
"""The same for SIGINT, as Ctrl-C sends it."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Choice(TypedDict):
    choices: Sequence[str]
    default: str
    metavar: str


def main() -> int:
    try:
        try:
            return run(sys.argv[1:], os.environ)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has ended, as `head` does when it has seen enough.
        _discard_output()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if (refusal := describe_refusal(error)) is None:
            raise
        print(f"baton: {refusal}; --folder names another place", file=sys.stderr)
        return EXIT_FAILED
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED if isinstance(error, ConfigurationError) else EXIT_FAILED


def describe_refusal(error: OSError) -> str | None:
    """Return what a file system refuses, for the user to mend: a folder that cannot be written, a full disk; else
    None."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    # An error of writing names no file.
    return f"a file cannot be written: {error.strerror}" if error.errno in _FULL else None


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    commands = find_commands()
    parsed = _parser(commands).parse_args(arguments)
    if parsed.command in commands:
        return commands[parsed.command].run(parsed)
    if parsed.command == "doctor":
        report = examine(read_survey())
        print(msgspec.json.encode(report).decode() if parsed.json else describe(report))
        return EXIT_FAILED if report.problems else 0
    if parsed.command == "trace":
        print(_trace(parsed, environ))
        return 0
    if parsed.command == "explain":
        print(explain(parsed.id, nats_url=_nats_url(parsed, environ), as_json=parsed.json))
        return 0
    if parsed.command == "index":
        print(_index(parsed, environ))
        return 0
    if parsed.command == "roles":
        wish = parse_wish(parsed.change)
        print(roles(wish, nats_url=_nats_url(parsed, environ), as_json=parsed.json))
        return 0
    if parsed.die_with_parent:
        die_with_parent(os.getppid(), signal.SIGTERM)
    deployment = Deployment(
        host=parsed.host,
        port=parsed.port,
        api_key=environ.get("API_KEY", ""),
        gateway_processes=parsed.gateway_processes,
        drain_s=parsed.drain_s,
        prefill=parsed.prefill,
        decode=parsed.decode,
        model=parsed.model,
        engine=parsed.engine,
        prefill_engine=parsed.prefill_engine or None,
        decode_engine=parsed.decode_engine or None,
        device=parsed.device,
        disaggregation=Disaggregation(parsed.disaggregation) if parsed.disaggregation else None,
        engine_options=parse_engine_options(parsed.engine_options),
        kv_pool_bytes=parse_pool_bytes(parsed.kv_pool_bytes),
        kv_path=KvPath(parsed.kv_path or KvPath.AUTO),
        kv_file_bytes=parsed.kv_file_bytes,
        kv_folder=parsed.kv_folder.absolute() if parsed.kv_folder else None,
        answer_format=parsed.answer_format,
        stored_keys=parsed.stored_keys,
        nats_url=parsed.nats_url or environ.get("NATS_URL", ""),
        redis_url=parsed.redis_url or environ.get("REDIS_URL", ""),
        pythons={"vllm": parsed.vllm_python.absolute(), "sglang": parsed.sglang_python.absolute()},
        folder=parsed.folder.absolute(),
    )
    up(deployment, environ, _tell)
    return 0


def _tell(text: str) -> None:
    """Print a line of `baton up`, which must supervise and end its deployment whether or not this is possible."""
    try:
        print(f"baton: {text}", flush=True)
    except BrokenPipeError:
        _discard_output()
    except OSError:
        pass  # A full disk, for example: it may have room for the next line.


def _discard_output() -> None:
    """Discard the output from now on: its reader has ended, and Python writes what it has buffered before it exits."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _parser(others: Mapping[str, Command]) -> argparse.ArgumentParser:
    # No abbreviations: --engin would be one flag today and two tomorrow.
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve a model with prefill and decode separated.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_trace(commands.add_parser("trace", help="show where the time of one request went", allow_abbrev=False))
    _add_explain(
        commands.add_parser("explain", help="show why a request ran where it did, and the outcome", allow_abbrev=False)
    )
    _add_index(
        commands.add_parser("index", help="show what the index knows, and who holds a prompt", allow_abbrev=False)
    )
    _add_roles(commands.add_parser("roles", help="show the workers' roles, or change one", allow_abbrev=False))
    _add_doctor(commands.add_parser("doctor", help="show what this machine has, and what to mend", allow_abbrev=False))
    for name, other in others.items():
        other.add_arguments(commands.add_parser(name, help=other.SUMMARY, allow_abbrev=False))
    command = commands.add_parser(
        "up",
        help="start everything on this machine and serve",
        allow_abbrev=False,
        description="Start NATS, Redis, the services and the workers on this machine; Ctrl-C ends them all.",
    )
    add = command.add_argument
    add("--host", default="127.0.0.1", help="address that the gateway listens on; default: %(default)s")
    add("--port", type=int, default=8000, help="port that the gateway listens on; default: %(default)s")
    add(
        "--gateway-processes",
        type=int,
        default=1,
        metavar="N",
        help="processes of the gateway, all on its port; default: %(default)s",
    )
    add(
        "--drain-s",
        type=int,
        default=DRAIN_S,
        metavar="S",
        help="seconds that running streams get to end after Ctrl-C; default: %(default)s",
    )
    add("--prefill", type=int, default=1, metavar="N", help="prefill workers; default: %(default)s")
    add(
        "--decode",
        type=_count_if_given,
        metavar="N",
        help="decode workers; default: one for each GPU that they may use, on a CPU one",
    )
    add("--model", default="", metavar="MODEL", help="a folder or a hub id; default: a tiny model with random weights")
    add(
        "--engine",
        choices=ENGINES,
        default="vllm",
        help="engine of all workers; simulated: none, for trials; default: %(default)s",
    )
    for role in Role:
        add(f"--{role}-engine", **_optional(ENGINES), help=f"another engine for {role} workers; default: --engine")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="what engines compute on; auto: the GPU where there is an NVIDIA driver and all engines are vLLM; "
        "default: %(default)s",
    )
    add(
        "--disaggregation",
        **_optional([placement.value for placement in Disaggregation]),
        help="whether prefill runs on another worker than decode; auto: where that is predicted to be faster; "
        "default: auto; on GPUs never, unless --kv-path is staged or gpu",
    )
    add(
        "--engine-options",
        default="",
        metavar="JSON",
        help='the engine\'s own flags: {"max_model_len": 4096}; for one of two engines: {"vllm": {"block_size": 64}}',
    )
    add(
        "--kv-pool-bytes",
        default=KV_POOL_AUTO,
        metavar="N",
        help="host memory in which each worker keeps KV that its engine forgets; 0: none; auto: a quarter of what is "
        "free, divided by the workers, 4 GiB each at most; default: %(default)s",
    )
    add(
        "--kv-path",
        **_optional([path.value for path in KvPath]),
        help="how KV of hand-offs leaves an engine: direct, peers read its memory; staged, it is copied to host memory "
        "first, as from a GPU; gpu, GPUs read each other (docs/gpu.md); default: auto, direct on a CPU; "
        "on GPUs KV is handed off with staged or gpu only",
    )
    add(
        "--kv-file-bytes",
        type=int,
        default=0,
        metavar="N",
        help="file in which each worker keeps KV beyond its pool and its own end; default: %(default)s, no file",
    )
    add("--kv-folder", type=Path, metavar="DIR", help="where these files are; default: .cache/kv")
    add(
        "--answer-format",
        default="",
        metavar="NAME",
        help="how the model writes reasoning and tool calls, such as hermes; default: found by its chat template",
    )
    add(
        "--stored-keys",
        action="store_true",
        help="take the API keys that `baton keys create` makes, beside those in API_KEY",
    )
    add("--nats-url", metavar="URL", help="use this NATS and start none; default: NATS_URL")
    add("--redis-url", metavar="URL", help="use this Redis and start none; default: REDIS_URL")
    for engine in ("vllm", "sglang"):
        add(
            f"--{engine}-python",
            type=Path,
            default=Path(sys.executable),
            metavar="PATH",
            help=f"Python that has {engine}; default: the one that runs this",
        )
    add("--folder", type=Path, default=Path(), metavar="DIR", help="where .run/ and .cache/ are made; default: here")
    add("--die-with-parent", action="store_true", help="end everything when the calling process ends, however it ends")
    return parser


def _count_if_given(text: str) -> int | None:
    """Return a number; None for an empty text, as `make` passes an unset variable."""
    try:
        return int(text) if text else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def _natural(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number, or less than 0")
    return int(text)


class _Choices(tuple[str, ...]):
    """What a flag takes beside an empty text, which messages need not name."""

    __slots__ = ()

    def __contains__(self, text: object) -> bool:
        return text == "" or super().__contains__(text)


def _optional(choices: Sequence[str]) -> _Choice:
    """Return a flag's keywords for `choices`; empty, as `make` passes an unset variable, means the default."""
    return {"choices": _Choices(choices), "default": "", "metavar": f"{{{','.join(choices)}}}"}


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.description = "Ask all services what they remember of a request, and show it as a waterfall."
    add = command.add_argument
    add("id", help="the x-request-id or the id of an answer, or a trace id")
    _add_deployment(command)


def _add_explain(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Show what schedulers decided about a request, every worker that they considered with each term of its cost, "
        "what was predicted, and what happened. Decisions are kept for an hour by default, over restarts of all "
        "services (--decisions-kept-s of the scheduler)."
    )
    command.add_argument("id", help="the x-request-id or the id of an answer")
    _add_deployment(command)


def _add_index(command: argparse.ArgumentParser) -> None:
    command.description = "Ask every index what it knows: sizes, workers, drift, shared prefixes, who holds a prompt."
    add = command.add_argument
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", metavar="TEXT", help="show who holds it, as /v1/completions takes it")
    prompt.add_argument("--tokens", default="", metavar="LIST", help="the same for token ids: 1,2,3")
    add("--model", default="", metavar="NAME", help="whose prompt that is, where several models are served")
    add("--salt", default="", metavar="SALT", help="cache_salt of the prompt")
    add("--top", type=_natural, default=10, metavar="N", help="prefixes to show; default: %(default)s")
    _add_deployment(command)


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Show GPUs, RDMA adapters and limits of this machine, which of them are near each other, and which transfer "
        "backend moves KV between which workers; then problems, each with its fix. Status 1 if there are problems."
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_roles(command: argparse.ArgumentParser) -> None:
    command.description = "Show the role and load of each worker; `set WORKER prefill|decode` changes a role."
    change = "set WORKER prefill|decode: the worker finishes its attempts and keeps its cache"
    command.add_argument("change", nargs="*", metavar="set WORKER ROLE", help=change)
    _add_deployment(command)


def _add_deployment(command: argparse.ArgumentParser) -> None:
    """Add flags that say where to ask, and in which form to answer."""
    add = command.add_argument
    add("--port", type=int, default=8000, help="the `baton up` to ask, by its port; default: %(default)s")
    add("--nats-url", default="", metavar="URL", help="message bus of another deployment; default: NATS_URL")
    add("--json", action="store_true", help="print JSON")
    add("--folder", type=Path, default=Path(), metavar="DIR", help="where `baton up` runs; default: here")


def _trace(parsed: argparse.Namespace, environ: Mapping[str, str]) -> str:
    look = Look(
        columns=shutil.get_terminal_size((100, 24)).columns,
        colour=sys.stdout.isatty() and not environ.get("NO_COLOR"),
        unicode=(sys.stdout.encoding or "").lower().startswith("utf"),
    )
    return trace(parsed.id, nats_url=_nats_url(parsed, environ), as_json=parsed.json, look=look)


def _index(parsed: argparse.Namespace, environ: Mapping[str, str]) -> str:
    question = Question(
        prompt=parsed.prompt,
        tokens=parse_tokens(parsed.tokens),
        model=parsed.model,
        salt=parsed.salt,
        prefixes_max=parsed.top,
    )
    return index(question, nats_url=_nats_url(parsed, environ), as_json=parsed.json)


def _nats_url(parsed: argparse.Namespace, environ: Mapping[str, str]) -> str:
    # The bus would log its attempts to connect; the error says how they ended.
    logging.basicConfig(level=logging.CRITICAL)
    return find_nats_url(parsed.nats_url, environ, parsed.folder.absolute() / ".run" / str(parsed.port))


def parse_pool_bytes(text: str) -> int | None:
    """Return a pool's size; None: `auto`. Raises ConfigurationError."""
    if text == KV_POOL_AUTO:
        return None
    if not text.isdecimal():
        raise ConfigurationError(f"the KV pool's size is a number of bytes or auto, not {text!r}")
    return int(text)


def parse_engine_options(text: str) -> Mapping[str, object]:
    """Return the user's engine flags. Raises ConfigurationError."""
    try:
        return msgspec.json.decode(text, type=dict[str, object]) if text else {}
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"the engine options are no JSON object: {error}") from error
