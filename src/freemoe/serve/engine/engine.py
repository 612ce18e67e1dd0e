"""The engine: one thread that owns the base, and the door to it for all others."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from freemoe.core.errors import DataError, FreeMoEError
from freemoe.core.registry import unknown_name
from freemoe.domain_experts.hosting.batches import special_tokens
from freemoe.evals.engine.answering import AUTO, BASE
from freemoe.serve.engine.outbox import EventQueue
from freemoe.serve.engine.requests import (
    ContextError,
    EngineError,
    QueueFullError,
    SequenceRequest,
    StoppingError,
)
from freemoe.serve.engine.runner import runner_for
from freemoe.serve.engine.scheduler import BatchScheduler
from freemoe.serve.engine.sequence import SequenceState
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.settings import EngineLimits

log = logging.getLogger(__name__)

Found = TypeVar("Found")


class InferenceEngine:
    """Answers many requests at once on one base.

    Its thread has the base's turn while there are requests; what else needs the base is done between two steps (`run_between_steps`).

    Attributes:
        failure: What ended it, where it was no `stop`: it takes no more requests.
        is_closed: Whether no more requests are taken.
    """

    def __init__(self, host: Any, limits: EngineLimits, watch: ServerMetrics | None = None) -> None:
        self.host, self.limits = host, limits
        with host.expert(BASE):
            self.runner = runner_for(host, limits)
        self._ends = frozenset(special_tokens(host.model, {})[1])
        self._scheduler = BatchScheduler(self.runner, limits, watch or ServerMetrics())
        self._lock = threading.Condition()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.leaving: dict[str, Future[None]] = {}
        self._ending = self.is_closed = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run_loop, name="freemoe engine", daemon=True)

    # ----------------------------------------------------------- for every thread

    def start(self) -> InferenceEngine:
        """Start the engine's thread; returns the engine."""
        self._thread.start()
        return self

    @property
    def experts(self) -> list[str]:
        """Names of the experts that can be asked for."""
        return [name for name in self.host.experts if name not in self.leaving]

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs and nothing has failed."""
        return self.failure is None and self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def submit(self, asks: Sequence[SequenceRequest]) -> list[EventQueue]:
        """Ask for several sequences, all of them or none.

        Raises:
            UnknownNameError: There is no such expert.
            DataError: A prompt is empty, or does not fit the context (`ContextError`).
            QueueFullError: Too many wait already.
            StoppingError: No more requests are taken.
            EngineError: It has failed.
        """
        for ask in asks:
            require_fit(ask.prompt, ask.max_tokens, self.limits.context)
        sequences = [
            SequenceState(ask, EventQueue(self.limits.pieces), self.host.tokenizer, self._ends) for ask in asks
        ]
        with self._lock:
            if self.is_closed:
                raise self._closed_error("is about to end and takes no more requests. Ask again in a moment")
            for ask in {ask.expert: ask for ask in asks}.values():
                if any(map(ask.uses_expert, self.leaving)):
                    raise unknown_name("expert", ask.expert, [BASE, AUTO, *self.experts])
                self.host.require(ask.expert)
            free = self.limits.batch - len(self._scheduler.running)
            if len(self._scheduler.waiting) + len(asks) > self.limits.queue + max(0, free):
                raise QueueFullError(
                    f"{len(self._scheduler.waiting)} sequences wait already, and with {len(asks)} more the queue of "
                    f"{self.limits.queue} is full. Ask again in a moment."
                )
            self._scheduler.waiting.extend(sequences)
            self._lock.notify_all()
        return [sequence.outbox for sequence in sequences]

    def run_between_steps(self, work: Callable[[], Found]) -> Future[Found]:
        """Have something done that needs the base, between two steps."""
        future: Future[Found] = Future()
        with self._lock:
            if self._ending:
                future.set_exception(self._closed_error("has ended"))
                return future
            self._jobs.append((future, work))
            self._lock.notify_all()
        return future

    def drop_expert(self, name: str) -> Future[None]:
        """Let go of an expert: nobody can ask for it any more, and once those who did have their answers it is gone."""
        with self._lock:
            if self._ending:
                raise self._closed_error("has ended")
            if name in self.leaving:
                return self.leaving[name]
            if name not in self.host.experts:
                raise unknown_name("expert", name, self.experts)
            future = self.leaving[name] = Future()
            self._lock.notify_all()
        return future

    def close(self) -> None:
        """Take no more requests; those that are there go on."""
        with self._lock:
            self.is_closed = True

    def stop(self) -> None:
        """End now; what has not ended gets an error."""
        with self._lock:
            self.is_closed = self._ending = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _closed_error(self, what: str) -> FreeMoEError:
        if self.failure is not None:
            return EngineError("The engine has failed and answers nothing any more: its log says why. Start it anew.")
        return StoppingError(f"The server {what}.")

    # ------------------------------------------------------------ its own thread

    def _run_loop(self) -> None:
        failure = None
        try:
            while self._wait_for_work():
                with self._lock:
                    self._scheduler.admit_waiting()
                if self._scheduler.running:
                    with torch.no_grad():
                        self._scheduler.step()
                    self._scheduler.report_queue_sizes()
                self._run_jobs()
        except BaseException as error:
            failure = error
            log.critical("The engine has failed; every request gets an error.", exc_info=error)
        finally:
            self._fail_pending(failure)

    def _wait_for_work(self) -> bool:
        """Wait for something to do; False at the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._ending or self._jobs or self.leaving or self.num_unfinished)
            return not self._ending

    def _run_jobs(self) -> None:
        with self._lock:
            jobs = len(self._jobs)
            gone = [n for n in self.leaving if not any(s.ask.uses_expert(n) for s in self._scheduler.all_sequences)]
            if jobs or gone or not self.num_unfinished:
                self.runner.release_model()
        for _ in range(jobs):
            _resolve_future(*self._jobs.popleft())
        for name in gone:
            _resolve_future(self.leaving[name], lambda name=name: self.host.delete_expert(name))
            with self._lock:
                del self.leaving[name]

    def _fail_pending(self, failure: BaseException | None) -> None:
        """Tell everybody who waits; nobody can be added any more."""
        with self._lock:
            self.is_closed = self._ending = True
            self.failure = failure
            error = self._closed_error("has ended before this answer did")
            futures = [future for future, _ in self._jobs] + list(self.leaving.values())
            self._jobs.clear()
        try:
            self._scheduler.fail_all(error)
        finally:
            for future in futures:
                if not future.done() and future.set_running_or_notify_cancel():
                    future.set_exception(error)
            self.runner.release_model()


def _resolve_future(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do what a future stands for."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        with torch.no_grad():
            future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise


def require_fit(prompt: Sequence[int], max_tokens: int, context: int) -> None:
    """Raise where a sequence does not fit the context; in OpenAI's words, by which clients know it."""
    if not prompt:
        raise DataError("The prompt is empty; at least 1 token is needed.")
    if len(prompt) + max_tokens > context:
        raise ContextError(
            f"This model's maximum context length is {context} tokens. However, you requested {len(prompt) + max_tokens} tokens "
            f"({len(prompt)} in the prompt, {max_tokens} in the completion). Please reduce the length of the prompt or of the "
            "completion."
        )
