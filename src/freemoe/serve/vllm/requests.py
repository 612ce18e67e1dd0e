"""Which expert a request asks for, and under which salt its keys and values are cached."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from vllm.v1.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from freemoe.core.errors import DataError, UnknownNameError
from freemoe.recipes.expert_names import BASE, ExpertRef

EXPERT = "expert"
"""Key of ``SamplingParams.extra_args`` and of ``vllm_xargs``."""

offered: set[str] = set()
"""Experts of the artefacts that this process serves; the linears' config adds them."""


def expert_of(params: Any) -> str:
    """The expert that sampling parameters ask for, ``base`` where none is named; pooling has none."""
    name = (getattr(params, "extra_args", None) or {}).get(EXPERT)
    if name is None:
        return BASE
    if not isinstance(name, str):
        raise DataError(f"expert is {name!r:.80}; the name of an expert, as text, is needed.")
    return name


def require_expert(name: str, known: Collection[str]) -> None:
    """Raise unless a name is ``base``, an expert, or a combination of experts (``a+b``, ``a&b``)."""
    if name == BASE or name in known:
        return
    try:
        ExpertRef.parse(name).require_known(sorted(known), (BASE,))
    except UnknownNameError as error:
        raise DataError(str(error)) from None


def salt_of(name: str, given: str | None) -> str | None:
    """The salt of a request's cached prefix: no two experts share one, whatever salt the client gave.

    A client's own salt, which keeps its prompts apart from other clients', is kept inside.
    """
    return None if name == BASE and not given else json.dumps([name, given])


class ExpertCheck(LogitsProcessorV1, LogitsProcessorV2):
    """Refuses a request for an unknown expert where vLLM takes it in: HTTP 400. It leaves logits as they are.

    vLLM asks its logits processors, of whichever runner, whether they can do with a request's parameters.
    """

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise unless the request's expert is known."""
        require_expert(expert_of(sampling_params), offered)

    def apply(self, logits: Any, ctx: Any = None) -> Any:
        """The logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """True, as logits are left unchanged."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing to do: no state between steps."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: there is nothing to apply."""
        return False
