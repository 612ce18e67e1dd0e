"""The worker: it holds the masks, and tells the linears at every step which token is whose, in either of vLLM's runners."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.platforms import current_platform

from freemoe.compat.vllm import around_steps
from freemoe.serve.vllm.linears import ExpertLinear
from freemoe.serve.vllm.models.plain import require_plain
from freemoe.serve.vllm.requests import BASE, expert_of
from freemoe.serve.vllm.step import token_groups, tokens_of

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class ExpertWorker(Worker):
    """vLLM's worker with an artefact's experts."""

    def init_device(self) -> None:
        """Refuse what experts cannot do with, then as vLLM does."""
        require_plain(
            self.vllm_config, "Experts per request", "merge one expert into a checkpoint (freemoe merge) and serve that"
        )
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the base, regenerate the masks, and follow the runner's steps."""
        super().load_model(*args, **kwargs)
        # Loaded here alone: the processes that only take requests need none of it.
        from freemoe.serve.vllm.masks import ExpertMasks

        model = self.model_runner.get_model()
        linears = {m.prefix: m for m in model.modules() if isinstance(getattr(m, "quant_method", None), ExpertLinear)}
        packed = self.vllm_config.quant_config.packed_modules_mapping
        masks = ExpertMasks(
            self.vllm_config.quant_config.folder,
            self.model_config.model,
            {name: _to_fused_linear(m, packed) for name, m in linears.items()},
            {name: m.weight for name, m in linears.items()},
        )
        if self.vllm_config.use_v2_model_runner:
            follow_second(self.model_runner.model_state, masks)
        else:
            follow_first(self.model_runner, masks)


def _set_step_masks(masks: Any, names: list[str], starts: Any) -> None:
    """Tell the linears which tokens of the coming step are whose.

    ``starts`` (requests + 1,) are where each one's tokens begin and the last one's end.
    """
    token_groups[:] = [
        (tokens.to(masks.device), masks.linear_masks(name))
        for name, tokens in tokens_of(names, starts).items()
        if name != BASE
    ]


def follow_first(runner: Any, masks: Any) -> None:
    """Let vLLM's first model runner tell the linears, around every step that it runs."""

    @contextmanager
    def masked_step() -> Iterator[None]:
        batch, count = runner.input_batch, runner.input_batch.num_reqs
        names = [expert_of(runner.requests[request].sampling_params) for request in batch.req_ids[:count]]
        _set_step_masks(masks, names, runner.query_start_loc.np[: count + 1])
        try:
            yield
        finally:
            token_groups.clear()

    around_steps(runner, masked_step)


def follow_second(state: Any, masks: Any) -> None:
    """Let the model state of vLLM's second model runner, which keeps requests in slots, tell them just before every step."""
    add, prepare, slots = state.add_request, state.prepare_inputs, {}

    def add_request(slot: int, request: Any) -> None:
        add(slot, request)
        slots[int(slot)] = expert_of(request.sampling_params)

    def prepare_inputs(batch: Any, states: Any) -> Any:
        # The rows of a trial run are of no request.
        names = [slots.get(int(slot), BASE) for slot in batch.idx_mapping_np[: batch.num_reqs]]
        _set_step_masks(masks, names, batch.query_start_loc_np[: batch.num_reqs + 1])
        return prepare(batch, states)

    state.add_request, state.prepare_inputs = add_request, prepare_inputs


def _to_fused_linear(module: Any, packed: dict[str, list[str]]) -> Any:
    """Which of the base's matrices a linear holds, from above."""
    from freemoe.serve.vllm.masks import FusedLinear

    path, _, own = module.prefix.rpartition(".")
    names, sizes = packed.get(own, [own]), list(getattr(module, "output_partition_sizes", [module.weight.shape[0]]))
    if len(names) != len(sizes):
        # One matrix in the base as well.
        names, sizes = [own], [sum(sizes)]
    return FusedLinear(
        [(f"{path}.{n}.weight", rows) for n, rows in zip(names, sizes, strict=True)], module.weight.shape[1]
    )
