"""The artefact of `trim`: a plan and hooks, kept outside of the base.

    hookmoe_config.json        plan, scope, position, rescale, family, hidden size
    hookmoe.safetensors        layers.N.up.weight, layers.N.down.weight, layers.N.r
    plan.json, exports/        what other engines can use

It is bound to its base by a fingerprint; `Trimmed.attached` puts it on and takes it off again, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from freemoe.core.artifacts import ArtefactManifest, read_manifest, read_tensors
from freemoe.core.errors import ArtifactError
from freemoe.core.files import write_atomic
from freemoe.core.threads import model_lock_of
from freemoe.hookmoe.artefact_files import CONFIG, KIND, WEIGHTS, name_in, read_config
from freemoe.hookmoe.decoding.quick import quick_decoding
from freemoe.hookmoe.hooks.hook import Hook, HookSet
from freemoe.hookmoe.plans.apply import RESCALES, apply_plan, probe_router_k
from freemoe.hookmoe.plans.layers import expert_counts, moe_layers, plan_of
from freemoe.hookmoe.plans.plan import LayerPlan, check_plan
from freemoe.hub.fetch import HubAccess
from freemoe.models.checkpoints.identity import require_base
from freemoe.models.checkpoints.loading import load_own_base
from freemoe.models.checkpoints.placement import Placement, require_one_device
from freemoe.models.spec import family_of


@dataclass(frozen=True, eq=False)
class Trimmed:
    """A plan with its hooks."""

    plan: LayerPlan  # Experts per layer
    hooks: HookSet | None = None  # What compensates; None for a plan alone
    rescale: str = "none"  # See `apply_plan`

    @contextmanager
    def attached(self, model: Any, quick: bool = False) -> Iterator[None]:
        """While open, the model runs trimmed; afterwards it is bit-equal to before. Nests with switched experts.

        Gates and layers of the one model are changed, so the thread that opens it has the model until it is closed: others
        that open it, or ask for a text of what `freemoe.load` returned, wait. ``model`` must not be called by others meanwhile.

        Args:
            model: The base.
            quick: Decode in compiled loops on a CPU (`quick_decoding`): equal within rounding, and much faster.
        """
        with ExitStack() as stack:
            stack.enter_context(model_lock_of(model).hold_lock())
            stack.enter_context(apply_plan(model, self.plan, self.rescale))
            if self.hooks is not None:
                stack.enter_context(self.hooks.attached(model))
            if quick:
                stack.enter_context(quick_decoding(model, self.plan, self.hooks, self.rescale))
            yield

    def as_type(self, dtype: torch.dtype) -> Trimmed:
        """With hook weights in another type; r stays in fp32."""
        if self.hooks is None:
            return self
        self.hooks.to(dtype)
        for _, hook in self.hooks.items():
            hook.r.data = hook.r.data.float()
        return self

    def hook_tensors(self) -> dict[str, Tensor]:
        """What stands in the safetensors file."""
        if self.hooks is None:
            return {}
        return {
            f"layers.{n}.{key}": value.detach().cpu().contiguous()
            for n, hook in self.hooks.items()
            for key, value in hook.state_dict().items()
        }


def save_adapter(trimmed: Trimmed, model: Any, folder: Path) -> None:
    """Write config and weights; the manifest is the caller's."""
    hooks = trimmed.hooks
    config = {
        "adapter_type": "hookmoe",
        "family": family_of(model).name,
        "hidden_size": moe_layers(model)[0].hidden,
        "num_hidden_layers": len(trimmed.plan.ks),
        "top_k": list(trimmed.plan.ks),
        "rescale": trimmed.rescale,
        "hook_layers": {str(n): h.width for n, h in hooks.items()} if hooks else {},
        "scope": hooks.scope if hooks else None,
        "position": hooks.position if hooks else None,
        "bias": bool(hooks and any(h.up.bias is not None for _, h in hooks.items())),
    }
    write_atomic(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    write_atomic(folder / WEIGHTS, save(trimmed.hook_tensors()))


def load_trimmed(
    folder: str | Path, base: str | None, dtype: str, device: Placement, access: HubAccess | None = None
) -> tuple[Any, Any, Trimmed]:
    """Load an artefact with its base. Gives the base, its tokenizer or None, and what is to be attached.

    Raises:
        ArtifactError, FamilyError: As `load_adapter`; a damaged artefact before its base is loaded.
    """
    manifest = read_manifest(folder)
    require_one_device(device, "A trimmed mixture")
    model, tokenizer = load_own_base(manifest, base, dtype, device, access)
    return model, tokenizer, load_adapter(folder, model, tokenizer)


def load_adapter(folder: str | Path, model: Any, tokenizer: Any = None) -> Trimmed:
    """Read an artefact for a model. A tokenizer is compared with the one that the plan was made with.

    Raises:
        ArtifactError: Damaged, of another kind, for another family, shape or base.
        FamilyError: The model's router does not do what its k says.
    """
    root = Path(folder)
    manifest = read_manifest(root)
    if manifest.get("kind") != KIND:
        raise ArtifactError(
            f"{str(root)!r} holds {manifest.get('kind')!r}, not a trimmed mixture. freemoe trim writes those."
        )
    config, hooks = read_hooks(root, manifest)
    _check_shape(config, model)
    require_base(manifest, model, tokenizer)
    probe_router_k(model)
    plan = LayerPlan(tuple(config["top_k"]))
    check_plan(plan, expert_counts(model))
    return Trimmed(plan, hooks if hooks is None else hooks.to_layer_devices(model), config["rescale"])


def read_hooks(folder: Path, manifest: ArtefactManifest) -> tuple[dict[str, Any], HookSet | None]:
    """The settings of an artefact and its hooks, None where it has none.

    Raises:
        ArtifactError: They are damaged, or hooks are not what the settings say.
    """
    config, tensors = read_config(folder, manifest), read_tensors(folder, name_in(manifest, WEIGHTS), manifest)
    if config["rescale"] not in RESCALES:
        raise ArtifactError(
            f"{str(folder)!r} has the rule {config['rescale']!r} for router weights; known: {', '.join(RESCALES)}."
        )
    try:
        return config, _build_hooks(config, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ArtifactError(
            f"The hooks of {str(folder)!r} are not what {name_in(manifest, CONFIG)} says ({type(error).__name__}: {error}). Copy the "
            "artefact again."
        ) from None


def _build_hooks(config: dict[str, Any], tensors: dict[str, Tensor]) -> HookSet | None:
    """The hooks of an artefact; every tensor is one of theirs."""
    left = dict(tensors)
    made = {int(n): Hook(config["hidden_size"], d, config["bias"]) for n, d in config["hook_layers"].items()}
    for n, hook in made.items():
        own = {key: left.pop(f"layers.{n}.{key}") for key in hook.state_dict()}
        if not all(value.is_floating_point() for value in own.values()):
            raise ValueError(f"layer {n} has integers where weights are needed")
        hook.to(own["up.weight"].dtype).load_state_dict(own)
        hook.r.data = own["r"]
    if left:
        raise ValueError(f"{next(iter(left))!r} belongs to no hook")
    return HookSet(made, config["scope"], config["position"]) if made else None


def _check_shape(config: dict[str, Any], model: Any) -> None:
    layers = moe_layers(model)
    seen = {
        "family": family_of(model).name,
        "hidden_size": layers[0].hidden,
        "num_hidden_layers": len(plan_of(model).ks),
    }
    for key, value in seen.items():
        if config[key] != value:
            raise ArtifactError(
                f"These hooks are for {key.replace('_', ' ')} {config[key]!r}, and the model has {value!r}. Load the base they "
                "were made for."
            )
