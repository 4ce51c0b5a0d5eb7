"""Builds SGLang's `Engine` from our options, and runs the part of it that lives in our process.

That part has an event loop of its own, on the thread that stays as long as SGLang's processes do: on the main
thread it would take the signals that are Baton's.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from baton.connectors.link import ADDRESS_VARIABLE, Failed, HostEnd, Opened, Order, Report, Setup
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
)
from baton.engines.sglang.options import CORES_VARIABLE, DIALECT, shared_cores, tensor_parallel_ranks
from baton.engines.sglang.plugins import CONNECTOR_VARIABLE
from baton.messages.workers import Role
from baton.transfer import AgentOptions

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

END_TIMEOUT_S: Final = 5.0
DISPATCH_INTERVAL_S: Final = 0.001


@contextmanager
def keeping_logs() -> Generator[None]:
    """Restore this process's log at the end of this context: SGLang replaces it by its own form and level.

    SGLang's own messages keep the level that it has set.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        if root.handlers != handlers:
            logging.getLogger("sglang").setLevel(root.level)
            # Closed ones, as these are, still write: their stream is standard error, which stays open.
            root.handlers[:] = handlers
            root.setLevel(level)


class SglangHost(EngineHost[tuple[Opened, ...]]):
    """Builds one `Opened` for each rank, in their order."""

    def __init__(
        self, model: str, role: Role, own: OwnOptions, options: Mapping[str, object], agent: AgentOptions
    ) -> None:
        super().__init__(DIALECT.engine, model)
        self.on_report: Callable[[int, Report], None] = lambda _rank, _report: None
        """Callback on our own loop, with the rank, ahead of the tokens of the step that the report describes."""
        self.on_death: Callable[[], None] = lambda: None
        self._role = role
        self._own = own
        self._options = options
        self._agent = agent
        self.ranks = tensor_parallel_ranks(options)
        self._link = HostEnd(self.ranks)
        self._sglang: Engine | None = None
        self._sglang_loop: asyncio.AbstractEventLoop | None = None
        self._failure = ""

    # ------------------------------------------------------------ on our loop

    async def generate(self, rid: str, tokens: list[int], **fields: object) -> AsyncGenerator[dict[str, Any], None]:
        """Yield SGLang's output for a request, step by step. Closing the iterator aborts the request."""
        # Bounded by the tokens that the request may generate.
        steps: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

        def put(step: dict[str, Any] | Exception | None) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(steps.put_nowait, step)

        assert self._sglang_loop is not None
        running = asyncio.run_coroutine_threadsafe(self._follow(put, rid, tokens, fields), self._sglang_loop)
        try:
            while (step := await steps.get()) is not None:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            running.cancel()

    def abort(self, rid: str) -> None:
        assert self._sglang_loop is not None
        self._sglang_loop.call_soon_threadsafe(self._abort, rid)

    def tell(self, order: Order) -> None:
        assert self._sglang_loop is not None
        self._sglang_loop.call_soon_threadsafe(self._link.tell, order)

    # ------------------------------------------------------------ on SGLang's

    def _build(self, model_path: str) -> tuple[Opened, ...]:
        with engine_environment(DIALECT):
            import torch

            here = Device.CUDA if torch.cuda.is_available() else Device.CPU
        path = choose_handoff(self._own, self._role, here)
        self._own = choose_pool(self._own, path)
        setup = Setup(
            agent=self._agent if path is not None else None,
            model_digest=self.digest,
            kv_pool_bytes=self._own.kv_pool_bytes,
            staging_tokens=self._own.kv_staging_tokens if path in STAGES else None,
            gpu_peers=path is KvPath.GPU,
            kv_file=self._own.kv_file,
            kv_file_bytes=self._own.kv_file_bytes,
        )
        connecting = threading.Thread(target=self._connect, args=(setup,), name="baton-sglang-link", daemon=True)
        connecting.start()
        before = set(multiprocessing.active_children())
        try:
            self._sglang = engine = self._launch(model_path, here)
            connecting.join()
            opened = tuple(report for _, report in self._link.reports() if isinstance(report, Opened))
            assert len(opened) == self.ranks
        except BaseException:
            self._failure = next(
                (report.reason for _, report in self._link.reports() if isinstance(report, Failed)), ""
            )
            self._link.close()
            connecting.join()
            _end({child.pid for child in set(multiprocessing.active_children()) - before if child.pid})
            raise
        self._sglang_loop = engine.loop
        return opened

    def _connect(self, setup: Setup) -> None:
        # Ended by `close` if SGLang's process does not connect.
        with suppress(OSError, EOFError):
            self._link.accept(setup)

    def _launch(self, model_path: str, here: Device) -> Engine:
        with engine_environment(DIALECT):
            from sglang.srt.server_args import ServerArgs

            profile = choose_profile(self._own.device, here, DIALECT)
            arguments: dict[str, Any] = engine_arguments(self._options, ServerArgs.__struct_fields__, profile, DIALECT)
            with engine_environment(DIALECT, profile):
                os.environ[ADDRESS_VARIABLE] = self._link.address
                os.environ[CONNECTOR_VARIABLE] = self._own.connector
                if here is Device.CPU and self.ranks > 1:
                    os.environ.setdefault(CORES_VARIABLE, shared_cores(self.ranks, os.sched_getaffinity(0)))
                from sglang.srt.entrypoints.engine import Engine

                from baton.connectors.sglang_cache import BACKEND

                events = {"publisher": "zmq", "endpoint": self.events_endpoint, "bind": True}
                with keeping_logs():
                    engine = Engine(
                        **{"log_level": "warning", **arguments},
                        model_path=model_path,
                        radix_cache_backend=BACKEND,
                        kv_events_config=msgspec.json.encode(events).decode(),
                        # Layers are promised to peers as the step writes them, which it does in the scheduler's own
                        # time.
                        disable_overlap_schedule=True,
                        incremental_streaming_output=True,
                        stream_interval=1,
                        sleep_on_idle=True,
                        skip_server_warmup=True,
                    )
        # Both would end this process, or all of its children, with the engine.
        engine.tokenizer_manager._subprocess_watchdog.stop()  # pyright: ignore
        atexit.unregister(engine.shutdown)
        return engine

    def _serve(self, built: tuple[Opened, ...]) -> None:
        assert self._sglang is not None and self._sglang_loop is not None
        loop, pids = self._sglang_loop, set(self._sglang.get_all_child_pids())
        watched = [os.pidfd_open(pid) for pid in pids]
        for connection in self._link.filenos():
            loop.add_reader(connection, self._take_reports)
        for process in watched:
            loop.add_reader(process, self._died, process)
        loop.run_until_complete(loop.run_in_executor(None, self._stop.wait))
        for process in watched:
            os.close(process)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        self._link.close()
        _end(pids)
        self._sglang = None

    def _abort(self, rid: str) -> None:
        assert self._sglang is not None and self._sglang_loop is not None
        state = self._sglang.tokenizer_manager.rid_to_state.get(rid)
        if state is not None and not state.dispatched:
            # It would overtake the request on its way to the scheduler, and be forgotten there.
            self._sglang_loop.call_later(DISPATCH_INTERVAL_S, self._abort, rid)
        elif state is not None:
            self._sglang.tokenizer_manager.abort_request(rid)

    def _died(self, process: int) -> None:
        assert self._sglang_loop is not None
        self._sglang_loop.remove_reader(process)
        self._take_reports()
        if not self._stop.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.on_death)

    def _take_reports(self) -> None:
        for rank, report in self._link.reports():
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.on_report, rank, report)

    async def _follow(
        self,
        put: Callable[[dict[str, Any] | Exception | None], None],
        rid: str,
        tokens: list[int],
        fields: Mapping[str, Any],
    ) -> None:
        assert self._sglang is not None
        try:
            stream = await self._sglang.async_generate(input_ids=tokens, rid=rid, stream=True, **fields)
            async with aclosing(stream):  # pyright: ignore[reportArgumentType]
                async for step in stream:  # pyright: ignore[reportGeneralTypeIssues]
                    # The schedulers have sent their reports before the tokens: they are here by now.
                    self._take_reports()
                    put(step)
        except Exception as error:  # noqa: BLE001
            # SGLang raises whatever its parts raise; the request's owner translates it.
            put(error)
        else:
            put(None)

    def _reason(self, error: Exception) -> str:
        return (
            self._failure
            or next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            or str(type(error).__name__)
        )


def _end(pids: set[int]) -> None:
    """End an engine's processes. They hold nothing that has to be written."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for child in multiprocessing.active_children():
        if child.pid in pids:
            child.join(END_TIMEOUT_S)
