"""Which expert stands in a base's weights now, whichever of its hosts and blocks asked for it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from freemoe.core.threads import model_lock_of
from freemoe.evals.engine.answering import BASE


class StackHost:
    """What `ExpertStack` asks of a host."""

    set_to: str = BASE  # The expert that is set until told otherwise

    def switch_in(self, name: str) -> None:
        """Put an expert into the weights, where now the base or another expert of this host is."""
        raise NotImplementedError

    def base_restorer(self) -> Callable[[], None]:
        """What puts the base back, also half way; it does not hold the host, and a second call does nothing."""
        raise NotImplementedError

    def guard_base(self) -> AbstractContextManager[None]:
        """What is open while an expert of this host is in the weights; it holds neither host nor base."""
        raise NotImplementedError


@dataclass(eq=False)
class ExpertBlock:
    """An open ``with`` block of a host."""

    host: StackHost
    name: str  # The expert that the block uses


class ExpertStack:
    """The blocks that are open on one base, innermost last, and the host whose expert is set outside of them.

    The weights are those of the innermost block. A block may end out of order, and on another thread (a generator that is
    collected): the others keep what they asked for, and when all have ended the base is what it was.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._blocks: list[ExpertBlock] = []
        self._set_by: weakref.ref[StackHost] | None = None
        # Whose expert is in the weights, which, and the way back.
        self._now: tuple[weakref.ref[StackHost], str, Callable[[], None]] | None = None
        self._guard = ExitStack()
        self._settling = False

    def name_of(self, host: StackHost) -> str:
        """The expert that a host uses: of its innermost block, else what it is set to."""
        with self._lock:
            return next((block.name for block in reversed(self._blocks) if block.host is host), host.set_to)

    def push_block(self, host: StackHost, name: str) -> ExpertBlock:
        """Begin a block; on an error it has not begun."""
        block = ExpertBlock(host, name)
        with self._lock:
            self._blocks.append(block)
            try:
                self._apply_top()
            except BaseException:
                self.remove_block(block)
                raise
        return block

    def remove_block(self, block: ExpertBlock) -> None:
        """End a block, and apply what is then on top; nothing happens if it has ended."""
        with self._lock:
            if block in self._blocks:
                self._blocks.remove(block)
            self._apply_top()

    def is_top(self, block: ExpertBlock) -> bool:
        """Whether a block is the innermost, and has the base in the weights."""
        return bool(self._blocks) and self._blocks[-1] is block and block.name == BASE

    def set_expert(self, host: StackHost, name: str) -> None:
        """Use an expert until told otherwise, or until the host's innermost block ends; on an error all is as before."""
        with self._lock:
            block = next((b for b in reversed(self._blocks) if b.host is host), None)
            before = host.set_to, self._set_by, block and block.name
            if block is not None:
                block.name = name
            else:
                host.set_to, self._set_by = name, weakref.ref(host, self._host_died)
            try:
                self._apply_top()
            except BaseException:
                host.set_to, self._set_by = before[:2]
                if block is not None:
                    block.name = str(before[2])
                self._apply_top()
                raise

    def _top_expert(self) -> tuple[StackHost | None, str]:
        if self._blocks:
            return self._blocks[-1].host, self._blocks[-1].name
        host = None if self._set_by is None else self._set_by()
        return host, BASE if host is None else host.set_to

    def _apply_top(self) -> None:
        """Bring what is wanted into the weights."""
        # A block may end in the middle of a switching, when garbage is collected: then whoever is switching looks again.
        if self._settling:
            return
        self._settling = True
        try:
            while True:
                host, name = self._top_expert()
                if self._now is not None and (name == BASE or self._now[0]() is not host):
                    self._restore_base()
                elif name != BASE and host is not None and (self._now is None or self._now[1] != name):
                    is_guarded = self._now is not None
                    self._now = weakref.ref(host), name, host.base_restorer()
                    host.switch_in(name)
                    if not is_guarded:
                        self._guard.enter_context(host.guard_base())
                else:
                    return
        except BaseException:
            self._restore_base()
            raise
        finally:
            self._settling = False

    def _restore_base(self) -> None:
        """Make the weights the base's again."""
        if self._now is not None:
            self._now[2]()
            self._guard.close()
            self._now = None

    def _host_died(self, _: object) -> None:
        """The host whose expert is set is gone, and nobody else could put the base back."""
        if not sys.is_finalizing():
            with self._lock:
                self._apply_top()

    def drop_experts(self, host: StackHost, gone: Callable[[str], bool]) -> None:
        """Use the base wherever a host uses an expert that is ``gone``."""
        with self._lock:
            for block in self._blocks:
                if block.host is host and gone(block.name):
                    block.name = BASE
            if gone(host.set_to):
                host.set_to = BASE
            self._apply_top()


def expert_stack_of(model: Any) -> ExpertStack:
    """The one of a base, whichever host asks; it goes with the base."""
    # A dictionary's setdefault is one step, also for two threads.
    return model_lock_of(model).shared.setdefault("standing", ExpertStack())


@contextmanager
def use_base(model: Any) -> Iterator[None]:
    """Inside a ``with`` block a model is the base, bit by bit, whichever host has an expert in it; takes its turn."""
    with model_lock_of(model).hold_lock():
        standing = expert_stack_of(model)
        block = standing.push_block(StackHost(), BASE)
        try:
            yield
        finally:
            standing.remove_block(block)
