"""Builds vLLM's `AsyncLLM` from our options, on a thread that stays as long as vLLM's processes do."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, cast

from baton.blocks import model_digest
from baton.engines.vllm.options import (
    PROFILES,
    Device,
    OwnOptions,
    check_handoff,
    engine_arguments,
    engine_environment,
    local_model,
)
from baton.engines.vllm.stats import LoadRecorder
from baton.errors import BatonError, ConfigurationError
from baton.transfer import AgentOptions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

_log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S: Final = 5.0
WORKER_EXTENSION: Final = "baton.connectors.vllm_extension.BatonWorker"


class VllmHost:
    """Owns the thread that builds vLLM and then waits: the kernel ties vLLM's processes to their parent's *thread*.

    Belongs to the event loop in which it is made.
    """

    def __init__(self, model: str, own: OwnOptions, options: Mapping[str, object], agent: AgentOptions) -> None:
        self._model = model
        self._own = own
        self._options = options
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[AsyncLLM] = self._loop.create_future()
        self._loaded = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-vllm-host", daemon=True)
        self.recorder = LoadRecorder(ranks=1)
        self.digest = ""
        # An abstract socket: no file that a killed worker could leave behind.
        self.events_endpoint = f"ipc://@baton-kv-{uuid.uuid4().hex}"

    async def start(self) -> AsyncLLM:
        """Load the model. Raises ConfigurationError with a sentence for the user."""
        self._thread.start()
        # The thread cannot be interrupted; `stop` makes it clean up behind itself.
        llm = await asyncio.shield(self._started)
        self._loaded = True
        self._started = self._loop.create_future()
        return llm

    async def stop(self) -> None:
        """End vLLM's processes. While the model still loads, they end once it has."""
        self._stop.set()
        if self._loaded:
            await asyncio.to_thread(self._thread.join)
        self._started.cancel()

    def _run(self) -> None:
        try:
            llm = self._build()
        except BatonError as error:
            self._tell(error)
            return
        except Exception as error:  # noqa: BLE001
            # vLLM raises whatever its parts raise; to the user they all mean that the model does not load.
            _log.debug("vLLM did not start", exc_info=True)
            failure = ConfigurationError(f"vLLM cannot serve the model {self._model}: {_reason(error)}", param="model")
            failure.__cause__ = error
            self._tell(failure)
            return
        self._tell(llm)
        self._stop.wait()
        llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        # vLLM keeps this frame in a traceback of its own, and an engine that outlives the interpreter complains.
        del llm

    def _tell(self, result: AsyncLLM | BatonError) -> None:
        def settle() -> None:
            if self._started.done():
                return
            if isinstance(result, BatonError):
                self._started.set_exception(result)
            else:
                self._started.set_result(result)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)

    def _build(self) -> AsyncLLM:
        path = local_model(self._model)
        self.digest = model_digest(path)
        with engine_environment():
            # vLLM reads parts of its environment when it is imported, and takes seconds to do so.
            from vllm.config import KVEventsConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            here = Device.CPU if current_platform.is_cpu() else Device.CUDA
            if self._own.device not in (Device.AUTO, here):
                raise ConfigurationError(
                    f"engine option device is {self._own.device}, but this vLLM is built for {here}", param="device"
                )
            profile = PROFILES[here]
            arguments: dict[str, Any] = engine_arguments(
                self._options, (field.name for field in fields(AsyncEngineArgs)), profile
            )
            if self._own.handoff:
                check_handoff(arguments)
            with engine_environment(profile):
                engine_args = AsyncEngineArgs(
                    **arguments,
                    model=str(path),
                    disable_log_stats=True,
                    worker_extension_cls=WORKER_EXTENSION,
                    # Agents speak of one pool of blocks: one cache group for all layers.
                    disable_hybrid_kv_cache_manager=True,
                    kv_transfer_config=self._transfer_config(),
                    kv_events_config=KVEventsConfig(
                        enable_kv_cache_events=True, publisher="zmq", endpoint=self.events_endpoint
                    ),
                )
                config = engine_args.create_engine_config()
                self.recorder = LoadRecorder(config.parallel_config.tensor_parallel_size)
                return AsyncLLM.from_vllm_config(config, stat_loggers=[self._stat_logger], disable_log_stats=True)

    def _stat_logger(self, _config: VllmConfig, _index: int) -> StatLoggerBase:
        # It has every method of vLLM's class, which it does not inherit so as to exist before vLLM is imported.
        return cast("StatLoggerBase", self.recorder)

    def _transfer_config(self) -> KVTransferConfig:
        from vllm.config import KVTransferConfig

        from baton.connectors.vllm import AGENT_SETTING, DIGEST_SETTING, AgentSetting

        module, _, connector = self._own.connector.partition(":")
        return KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            # Any worker can run either leg, and change its role while it runs.
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                AGENT_SETTING: AgentSetting(self._agent) if self._own.handoff else None,
                DIGEST_SETTING: self.digest,
            },
        )


def _reason(error: Exception) -> str:
    """Return one line of what vLLM says; its processes have logged their own reasons before."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # pydantic, which checks vLLM's settings, names its class first and the reason in the line after.
    reason = lines[1].removeprefix("Value error, ") if " validation error" in lines[0] and lines[1:] else lines[0]
    if not reason or reason.startswith("Engine core initialization failed"):
        return "its engine process ended while loading, for the reason in the log above"
    return reason
