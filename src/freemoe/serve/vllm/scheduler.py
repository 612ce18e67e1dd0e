"""Where a request enters the engine: its salt becomes that of its expert, whichever client sent it."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from freemoe.core.errors import DataError
from freemoe.serve.vllm.requests import BASE, expert_of, require_expert, salt_of


class ExpertScheduler(Scheduler):
    """vLLM's scheduler, for requests that name an expert.

    The keys and values of a prefix are those of the expert that read it: with the salt that the client gave, or none, a request
    would go on from another expert's.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._known = vllm_config.quant_config.names

    def add_request(self, request: Any) -> None:
        """Take a request in, under its expert's salt.

        Raises:
            DataError: The expert is unknown, which vLLM was to refuse before (`requests.ExpertCheck`); or the request is a session
                whose input is streamed, which could change its expert midway.
        """
        name = expert_of(request.sampling_params)
        require_expert(name, self._known)
        if name != BASE and request.resumable:
            raise DataError(f"A session whose input is streamed cannot have expert {name!r}; send whole prompts.")
        request.cache_salt = salt_of(name, request.cache_salt)
        # They were made with the salt that the client gave.
        request.block_hashes = []
        request.update_block_hashes()
        super().add_request(request)
