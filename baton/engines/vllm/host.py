"""Builds vLLM's `AsyncLLM` from our options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, cast

from baton.engines.gpu_profiles import VLLM_FLAGS, gpu_options
from baton.engines.host import EngineHost
from baton.engines.options import (
    STAGES,
    Device,
    KvPath,
    OwnOptions,
    choose_handoff,
    choose_pool,
    choose_profile,
    engine_arguments,
    engine_environment,
    on_gpu,
)
from baton.engines.vllm.options import DEFAULT_STRUCTURED_OUTPUTS, DIALECT, check_handoff, choose_executor
from baton.engines.vllm.stats import StatLogger
from baton.errors import ConfigurationError
from baton.messages.workers import Role
from baton.transfer import AgentOptions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

SHUTDOWN_TIMEOUT_S: Final = 5.0
WORKER_EXTENSION: Final = "baton.connectors.vllm_extension.BatonWorker"
HYBRID: Final = (
    "some of this model's layers keep a state in place of KV, and Baton runs vLLM with one pool of KV blocks"
)


class VllmHost(EngineHost["AsyncLLM"]):
    def __init__(
        self, model: str, role: Role, own: OwnOptions, options: Mapping[str, object], agent: AgentOptions
    ) -> None:
        super().__init__(DIALECT.engine, model)
        self._role = role
        self._own = own
        self._options = options
        self._agent = agent
        self.recorder = StatLogger(ranks=1)

    def _serve(self, built: AsyncLLM) -> None:
        self._stop.wait()
        built.shutdown(timeout=SHUTDOWN_TIMEOUT_S)

    def _build(self, model_path: str) -> AsyncLLM:
        with engine_environment(DIALECT):
            # vLLM reads parts of its environment when it is imported, and takes seconds to do so.
            from vllm.config import KVEventsConfig, StructuredOutputsConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            here = Device.CPU if current_platform.is_cpu() else Device.CUDA
            profile = choose_profile(self._own.device, here, DIALECT)
            if here is Device.CUDA:
                profile = on_gpu(profile, gpu_options(VLLM_FLAGS, current_platform.get_device_name()))
            arguments: dict[str, Any] = engine_arguments(
                self._options, (field.name for field in fields(AsyncEngineArgs)), profile, DIALECT
            )
            path = choose_handoff(self._own, self._role, here)
            if path is not None:
                check_handoff(arguments)
            self._own = choose_pool(self._own, path)
            with engine_environment(DIALECT, profile):
                choose_executor(arguments, os.environ)
                structured = StructuredOutputsConfig(
                    **{**DEFAULT_STRUCTURED_OUTPUTS, **arguments.pop("structured_outputs_config", {})}
                )
                engine_args = AsyncEngineArgs(
                    **arguments,
                    structured_outputs_config=structured,
                    model=model_path,
                    disable_log_stats=True,
                    worker_extension_cls=WORKER_EXTENSION,
                    # Agents speak of one pool of blocks: one cache group for all layers.
                    disable_hybrid_kv_cache_manager=True,
                    kv_transfer_config=self._transfer_config(path),
                    kv_events_config=KVEventsConfig(
                        enable_kv_cache_events=True, publisher="zmq", endpoint=self.events_endpoint
                    ),
                )
                config = engine_args.create_engine_config()
                if config.model_config.is_hybrid:
                    raise ConfigurationError(HYBRID, param="model")
                self.recorder = StatLogger(config.parallel_config.tensor_parallel_size)
                return AsyncLLM.from_vllm_config(config, stat_loggers=[self._stat_logger], disable_log_stats=True)

    def _stat_logger(self, _config: VllmConfig, _index: int) -> StatLoggerBase:
        # It has every method of vLLM's class, which it does not inherit so as to exist before vLLM is imported.
        return cast("StatLoggerBase", self.recorder)

    def _transfer_config(self, path: KvPath | None) -> KVTransferConfig:
        from vllm.config import KVTransferConfig

        from baton.connectors.vllm_messages import SETTINGS, ConnectorSettings

        module, _, connector = self._own.connector.partition(":")
        return KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            # Any worker can run either leg, and change its role while it runs.
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                SETTINGS: ConnectorSettings(
                    agent=self._agent if path is not None else None,
                    model_digest=self.digest,
                    kv_pool_bytes=self._own.kv_pool_bytes,
                    staging_tokens=self._own.kv_staging_tokens if path in STAGES else None,
                    gpu_peers=path is KvPath.GPU,
                    kv_file=self._own.kv_file,
                    kv_file_bytes=self._own.kv_file_bytes,
                )
            },
        )

    def _reason(self, error: Exception) -> str:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        # pydantic, which checks vLLM's settings, names its class first and the reason in the line after.
        reason = lines[1].removeprefix("Value error, ") if " validation error" in lines[0] and lines[1:] else lines[0]
        if not reason or reason.startswith("Engine core initialization failed"):
            return "its engine process ended while loading, for the reason in the log above"
        return reason
