"""Builds an engine on a thread that stays as long as the engine's processes do."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from baton.blocks import model_digest
from baton.engines.options import local_model
from baton.errors import BatonError, ConfigurationError

_log = logging.getLogger(__name__)

Built = TypeVar("Built")


class EngineHost(ABC, Generic[Built]):
    """Owns the thread that builds an engine and then serves: the kernel ties its processes to their parent's *thread*.

    Belongs to the event loop in which it is made.
    """

    def __init__(self, engine: str, model: str) -> None:
        self.digest = ""
        # An abstract socket: no file that a killed worker could leave behind.
        self.events_endpoint = f"ipc://@baton-kv-{uuid.uuid4().hex}"
        self._engine = engine
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[Built] = self._loop.create_future()
        self._loaded = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"baton-{engine.lower()}-host", daemon=True)

    async def start(self) -> Built:
        """Load the model. Raises ConfigurationError with a sentence for the user."""
        self._thread.start()
        # The thread cannot be interrupted; `stop` makes it clean up behind itself.
        built = await asyncio.shield(self._started)
        self._loaded = True
        self._started = self._loop.create_future()
        return built

    async def stop(self) -> None:
        """End the engine's processes. While the model still loads, they end once it has."""
        self._stop.set()
        if self._loaded:
            await asyncio.to_thread(self._thread.join)
        self._started.cancel()

    @abstractmethod
    def _build(self, model_path: str) -> Built:
        """Start the engine's processes and wait until the model is loaded."""

    @abstractmethod
    def _serve(self, built: Built) -> None:
        """Wait for `_stop`, then end the engine's processes."""

    @abstractmethod
    def _reason(self, error: Exception) -> str:
        """Return the engine's error as one line; its processes have logged their own reasons before."""

    def _run(self) -> None:
        try:
            path = local_model(self._model)
            self.digest = model_digest(path)
            built = self._build(str(path))
        except BatonError as error:
            self._tell(error)
            return
        except Exception as error:  # noqa: BLE001
            # Engines raise whatever their parts raise; to the user they all mean that the model does not load.
            _log.debug("%s did not start", self._engine, exc_info=True)
            failure = ConfigurationError(
                f"{self._engine} cannot serve the model {self._model}: {self._reason(error)}", param="model"
            )
            failure.__cause__ = error
            self._tell(failure)
            return
        self._tell(built)
        self._serve(built)
        # vLLM keeps this frame in a traceback of its own, and an engine that outlives the interpreter complains.
        del built

    def _tell(self, result: Built | BatonError) -> None:
        def settle() -> None:
            if self._started.done():
                return
            if isinstance(result, BatonError):
                self._started.set_exception(result)
            else:
                self._started.set_result(result)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)
