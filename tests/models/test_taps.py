"""Taps: they nest, vanish, change nothing, and give every row its token."""

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from freemoe.core.errors import FamilyError
from freemoe.models import taps
from freemoe.models.taps import tap_inputs
from freemoe.models.weights import find_weights
from tests.tiny import CASES, IDS, logits, model_and_weights, tiny_model


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_bit_equal_and_taps_vanish(case):
    model, weights = model_and_weights(case)
    before, bare = hooks(model), logits(model)
    calls = {}

    def see(tap, expert, x, token):
        assert not x.requires_grad
        assert x.shape == (len(token), columns[tap])
        assert token.dtype == torch.int64
        calls.setdefault(tap, set()).add(expert)

    columns = {w.tap: w.num_columns for w in weights}
    with tap_inputs(model, weights, see):
        assert torch.equal(logits(model), bare)
    assert set(calls) == set(columns)
    assert hooks(model) == before
    calls.clear()
    assert torch.equal(logits(model), bare)
    assert not calls


@pytest.mark.parametrize("case", CASES)
def test_token_is_the_flat_index_of_its_row(case):
    """The first tap of the model sees its embeddings: each row must be what that token alone gives."""
    model = tiny_model(case)
    (rows, _), (alone, _) = (overheard(model, find_weights(model), ids) for ids in (IDS, IDS[1:2]))
    # Document 1 stands at 7..13 of the batch; computed alone it stands at 0..6.
    for key, (x, token) in alone.items():
        batch_x, batch_token = rows[key]
        inside = (batch_token >= 7) & (batch_token < 14)
        assert torch.equal(batch_token[inside] - 7, token), key
        torch.testing.assert_close(batch_x[inside], x, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def overheard(model, weights, ids=IDS):
    """(tap, expert) -> the rows that it was given, and their tokens; then the model's logits."""
    seen = {}
    with tap_inputs(model, weights, lambda tap, e, x, token: seen.setdefault((tap, e), (x, token))):
        return seen, model(input_ids=ids).logits


def experts_of(case):
    """A model with fused experts, their module's parameter names, and the reference inputs of its down projection."""
    model = tiny_model(case)
    model.set_experts_implementation("eager")
    seen, _ = overheard(model, find_weights(model, "mlp"))
    return model, {key: value for key, value in seen.items() if key[0].endswith("down_proj")}


def require_heard(seen, eager):
    for key, (x, token) in eager.items():
        assert torch.equal(seen[key][1], token)
        torch.testing.assert_close(seen[key][0], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_what_is_overheard_is_what_eager_computes_anew(case, implementation):
    model, eager = experts_of(case)
    model.set_experts_implementation(implementation)
    before, anew = vars(model.model.layers[-1].mlp.experts).copy(), []
    compute = taps._intermediate_states

    def counted(module, gate, experts, expert, x):
        anew.append(len(x))
        return compute(module, gate, experts, expert, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taps, "_intermediate_states", counted)
        seen, _ = overheard(model, find_weights(model, "mlp"))
    # Two single rows per layer make sure of the order; nothing else is computed again.
    assert set(anew) == {1}
    require_heard(seen, eager)
    assert vars(model.model.layers[-1].mlp.experts).keys() == before.keys()


def test_an_unknown_order_of_rows_is_computed_anew(monkeypatch):
    """Another version of transformers may sort the experts' rows otherwise."""
    model, eager = experts_of("mixtral")

    def turned(self, hidden, index, weights):
        total = torch.zeros_like(hidden)
        # All rows at once, the last token first.
        rows = hidden.flip(0).repeat_interleave(index.shape[1], 0)
        expert = index.flip(0).reshape(-1)
        inner = self._apply_gate(torch.einsum("tc,trc->tr", rows, self.gate_up_proj[expert]))
        out = torch.einsum("tc,trc->tr", inner, self.down_proj[expert]) * weights.flip(0).reshape(-1, 1)
        return total + out.view(len(hidden), -1, hidden.shape[1]).sum(1).flip(0)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "turned", turned)
    model.config._experts_implementation = "turned"
    seen, turned_logits = overheard(model, find_weights(model, "mlp"))
    require_heard(seen, eager)
    model.set_experts_implementation("grouped_mm")
    torch.testing.assert_close(turned_logits, logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_nested_taps_hear_the_same(implementation):
    model, eager = experts_of("gpt_oss")
    model.set_experts_implementation(implementation)
    weights, outer = find_weights(model, "mlp"), {}
    with tap_inputs(model, weights, lambda tap, e, x, token: outer.update({(tap, e): (x, token)})):
        inner, _ = overheard(model, weights)
    require_heard(outer, eager)
    assert all(torch.equal(outer[key][0], inner[key][0]) for key in eager)


def test_taps_vanish_after_an_error():
    model = tiny_model("qwen2_moe")
    before = hooks(model)
    with pytest.raises(ZeroDivisionError), tap_inputs(model, find_weights(model), lambda *_: 1 / 0):
        logits(model)
    assert hooks(model) == before


@pytest.mark.parametrize(
    ("case", "more", "message"),
    [
        ("llama", {"num_hidden_layers": 3}, r"No module 'model\.layers\.2\.self_attn\.q_proj'"),
        ("mixtral", {}, "no fused experts"),
    ],
)
def test_every_tap_must_be_in_the_model(llama, case, more, message):
    before = hooks(llama)
    weights = find_weights(tiny_model(case, **more), "both" if more else "mlp")
    with pytest.raises(FamilyError, match=message), tap_inputs(llama, weights, print):
        pass
    assert hooks(llama) == before


def test_dropped_slots_are_not_seen():
    """An index equal to the number of experts marks a slot that was switched off."""
    model = tiny_model("mixtral")
    model.set_experts_implementation("eager")
    weights = find_weights(model, "mlp", (0, 1))

    def drop(module, args, output):
        scores, weights, index = output
        index = index.clone()
        index[:, 1] = 4
        return scores, weights, index

    model.model.layers[0].mlp.gate.register_forward_hook(drop)
    seen = []
    with tap_inputs(model, weights, lambda tap, e, x, token: seen.append((tap, e, len(token)))):
        try:
            logits(model)
        except RuntimeError as error:
            if "num_classes" in str(error):
                pytest.skip("this transformers (5.16 and before) refuses such an index by itself")
            raise
    assert sum(n for tap, _, n in seen if tap.endswith("down_proj")) == IDS.numel()
    assert all(e < 4 for _, e, _ in seen)


def test_taps_do_not_disturb_gradients():
    model = tiny_model("mixtral")
    model.train()
    with tap_inputs(model, find_weights(model), lambda *_: None):
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(w.parameter.grad is not None for w in find_weights(model))
