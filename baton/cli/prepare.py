"""`python -m baton.cli.prepare`: a model in a folder, and beside it worker.toml, the settings to serve it with.

It decides what `baton up` decides before it starts workers, for deployments that start them otherwise: compose.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from baton.cli.deployment import ENGINES, Deployment, engine_settings, model_folder, resolve
from baton.cli.main import describe_refusal, parse_engine_options, parse_pool_bytes
from baton.engines.options import KV_POOL_AUTO, KvPath
from baton.errors import BatonError
from baton.messages.placement import Disaggregation
from baton.messages.workers import Role
from baton.stop import EXIT_FAILED, EXIT_MISCONFIGURED

SETTINGS_FILE = "worker.toml"


def prepare(deployment: Deployment) -> Path:
    """Make or load the model, and return the file with the workers' settings, which appears whole."""
    deployment = resolve(deployment, gpu=False)
    settings = asdict(engine_settings(deployment, model_folder(deployment), deployment.engine))
    unfinished = deployment.folder / f".{SETTINGS_FILE}-{os.getpid()}"
    unfinished.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in settings.items()), encoding="utf-8")
    return unfinished.rename(deployment.folder / SETTINGS_FILE)


def _toml(value: object) -> str:
    """Return a value that came from JSON as TOML, which differs in tables and in having no null."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return f"{{{', '.join(f'{_toml(key)} = {_toml(item)}' for key, item in table.items() if item is not None)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in cast('list[object]', value))}]"
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="baton.cli.prepare", description="Prepare a model and its workers' settings.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the model and worker.toml go")
    parser.add_argument("--model", default="", help="a folder or a hub id; default: a tiny one with random weights")
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="engine of the workers; default: %(default)s")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what they compute on; default: %(default)s"
    )
    parser.add_argument(
        "--disaggregation",
        choices=[placement.value for placement in Disaggregation],
        help="what the scheduler is set to; refused where the device cannot do it",
    )
    parser.add_argument("--engine-options", default="", metavar="JSON", help="engine flags that win over the defaults")
    parser.add_argument(
        "--kv-pool-bytes", default=KV_POOL_AUTO, metavar="N", help="as of `baton up`; default: %(default)s"
    )
    for role in Role:
        parser.add_argument(
            f"--{role}", type=int, default=1, metavar="N", help=f"{role} workers of this host; default: %(default)s"
        )
    parser.add_argument(
        "--kv-path", type=KvPath, choices=list(KvPath), default=KvPath.AUTO, help="how KV of hand-offs leaves an engine"
    )
    parsed = parser.parse_args()
    try:
        deployment = Deployment(
            folder=parsed.folder,
            model=parsed.model,
            engine=parsed.engine,
            device=parsed.device,
            disaggregation=Disaggregation(parsed.disaggregation) if parsed.disaggregation else None,
            engine_options=parse_engine_options(parsed.engine_options),
            kv_pool_bytes=parse_pool_bytes(parsed.kv_pool_bytes),
            kv_path=parsed.kv_path,
            pythons={},
            prefill=parsed.prefill,
            decode=parsed.decode,
        )
        print(f"baton: the workers' settings are in {prepare(deployment)}")
    except BatonError as error:
        print(f"baton-prepare: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    except OSError as error:
        if (refusal := describe_refusal(error)) is None:
            raise
        print(f"baton-prepare: {refusal}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
