"""The worker: it holds the masks, and tells the linears at every step which token is whose, in either of vLLM's runners."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from freemoe.core.errors import RecipeError
from freemoe.serve.vllm.linears import ExpertLinear
from freemoe.serve.vllm.requests import BASE, expert_of
from freemoe.serve.vllm.step import now, tokens_of

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class ExpertWorker(Worker):
    """vLLM's worker with an artefact's experts.

    Raises:
        RecipeError: vLLM is to split the model, to guess tokens ahead, to replay graphs, or to take keys and values from elsewhere.
    """

    def init_device(self) -> None:
        """Refuse what experts cannot do with, then as vLLM does."""
        _require_plain(self.vllm_config)
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the base, regenerate the masks, and follow the runner's steps."""
        super().load_model(*args, **kwargs)
        # Loaded here alone: the processes that only take requests need none of it.
        from freemoe.serve.vllm.masks import ExpertMasks

        model = self.model_runner.get_model()
        linears = {m.prefix: m for m in model.modules() if _is_ours(m)}
        packed = self.vllm_config.quant_config.packed_modules_mapping
        masks = ExpertMasks(
            self.vllm_config.quant_config.folder,
            self.model_config.model,
            {name: _held(m, packed) for name, m in linears.items()},
            {name: m.weight for name, m in linears.items()},
        )
        follower: Any = self.model_runner
        mixin: type = FollowsV1
        if self.vllm_config.use_v2_model_runner:
            follower, mixin = self.model_runner.model_state, FollowsV2
        follower.__class__ = type(f"Expert{type(follower).__name__}", (mixin, type(follower)), {})
        follower.expert_masks = masks


class _Follows:
    """Whatever prepares a step of vLLM's.

    Attributes:
        expert_masks: What the experts have off.
    """

    expert_masks: Any

    def assign(self, names: list[str], starts: Any) -> None:
        """Tell the linears which tokens are whose.

        Args:
            names: The expert of every request, in the order of its tokens.
            starts: (requests + 1,) where each one's tokens begin and the last one's end.
        """
        device = next(iter(self.expert_masks.weights.values())).device
        now.groups = [
            (tokens.to(device), self.expert_masks.parts(name))
            for name, tokens in tokens_of(names, starts).items()
            if name != BASE
        ]


class FollowsV1(_Follows):
    """Comes before vLLM's first model runner."""

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        batch: Any = self.input_batch  # pyright: ignore[reportAttributeAccessIssue]
        known: Any = self.requests  # pyright: ignore[reportAttributeAccessIssue]
        starts: Any = self.query_start_loc  # pyright: ignore[reportAttributeAccessIssue]
        count = batch.num_reqs
        names = [expert_of(known[request].sampling_params) for request in batch.req_ids[:count]]
        self.assign(names, starts.np[: count + 1])
        try:
            return super()._model_forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            now.groups = []


class FollowsV2(_Follows):
    """Comes before the model state of vLLM's second model runner, which keeps requests in slots."""

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Note the expert of a slot."""
        super().add_request(req_index, new_req_data)  # pyright: ignore[reportAttributeAccessIssue]
        self.__dict__.setdefault("expert_slots", {})[int(req_index)] = expert_of(new_req_data.sampling_params)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        """Tell the linears, just before the step runs."""
        slots = self.__dict__.get("expert_slots", {})
        # The rows of a trial run are of no request.
        names = [slots.get(int(slot), BASE) for slot in input_batch.idx_mapping_np[: input_batch.num_reqs]]
        self.assign(names, input_batch.query_start_loc_np[: input_batch.num_reqs + 1])
        return super().prepare_inputs(input_batch, req_states)  # pyright: ignore[reportAttributeAccessIssue]


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, LinearBase) and isinstance(module.quant_method, ExpertLinear)


def _held(module: Any, packed: dict[str, list[str]]) -> Any:
    """Which of the base's matrices a linear holds, from above."""
    from freemoe.serve.vllm.masks import Fused

    path, _, own = module.prefix.rpartition(".")
    names, sizes = packed.get(own, [own]), list(getattr(module, "output_partition_sizes", [module.weight.shape[0]]))
    if len(names) != len(sizes):
        # One matrix in the base as well.
        names, sizes = [own], [sum(sizes)]
    return Fused([(f"{path}.{n}.weight", rows) for n, rows in zip(names, sizes, strict=True)], module.weight.shape[1])


def _require_plain(config: Any) -> None:
    parallel = config.parallel_config
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.data_parallel_size
    refused = {
        f"a model over {world} workers (tensor, pipeline or data parallel)": world > 1,
        "speculative decoding": config.speculative_config is not None,
        "LoRA adapters": config.lora_config is not None,
        "keys and values from elsewhere (kv_transfer_config)": config.kv_transfer_config is not None,
        "CUDA graphs": not config.model_config.enforce_eager and not current_platform.is_cpu(),
    }
    if wrong := [what for what, asked in refused.items() if asked]:
        raise RecipeError(
            f"Experts per request do not go with {' and '.join(wrong)}: masks are of whole weights in one worker that runs "
            "eagerly. Leave it out, or merge one expert into a checkpoint (freemoe merge) and serve that."
        )
