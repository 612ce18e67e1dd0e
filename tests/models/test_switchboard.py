"""The switchboard against plain switching: bit by bit, in every layout, whoever else edits and whenever it breaks."""

import itertools
import random
from unittest.mock import Mock

import pytest
import torch

from freemoe.core import threads
from freemoe.core.errors import DataError
from freemoe.models import switchboard
from freemoe.models.mask import Mask, MaskError, TensorMask
from freemoe.models.switchboard import ExpertCache
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.masks import mask_of
from tests.models.test_switching import some
from tests.tiny import CASES, bits, model_and_weights, tiny_model, unchanged


def expected(model, weights, mask):
    """Every parameter's bits with a mask off, by plain switching, which leaves them as they were."""
    before = bits(model)
    with switched_off(weights, mask):
        found = bits(model)
    assert unchanged(model, before)
    return found


def all_expected(model, weights, experts):
    return {name: expected(model, weights, mask) for name, mask in {**experts, None: Mask()}.items()}


def experts_of(weights, shares=(0.1, 0.3, 0.02)):
    return {f"e{i}": some(weights, share, i) for i, share in enumerate(shares)}


def board_of(weights, experts):
    board = ExpertCache(weights)
    for name, mask in experts.items():
        board.add_expert(name, mask)
    return board


def check_switching(model, weights, names, after=lambda: None, experts=None):
    """Switch to the experts one after the other, and at last to the base: each time it is what plain switching gives."""
    experts = experts or experts_of(weights)
    board = board_of(weights, experts)
    masked = all_expected(model, weights, experts)
    for name in [*names, None]:
        board.activate_expert(name)
        assert board.active_expert == name
        assert unchanged(model, masked[name]), name
        after()
    return board


@pytest.fixture
def experts(weights):
    return experts_of(weights)


@pytest.fixture
def board(weights, experts):
    return board_of(weights, experts)


@pytest.fixture
def masked(llama, weights, experts):
    """The bits of the base (None) and of every expert."""
    return all_expected(llama, weights, experts)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [(case, dtype) for case in ("llama", "gpt2", "gpt_oss") for dtype in (torch.bfloat16, torch.float16)],
)
def test_any_order_of_experts_gives_what_plain_switching_gives(case, dtype):
    model = tiny_model(case).to(dtype)
    names = ["e0", "e1", "e2", None]
    check_switching(model, find_weights(model), [*names, *random.Random(0).choices(names, k=12)])


@pytest.mark.parametrize(
    ("dtype", "quiet", "signalling"),
    [(torch.float32, 0x7FC12345, 0x7F812345), (torch.bfloat16, 0x7FC1, 0x7F81), (torch.float16, 0x7FC1, 0x7C81)],
)
@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_oss"])
def test_strange_bits_survive(case, dtype, quiet, signalling):
    model = tiny_model(case).to(dtype)
    weights = find_weights(model)
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    lowest = torch.iinfo(integer).min
    for weight in weights:
        flat = weight.parameter.data.view(integer).view(-1)
        flat[0:4] = torch.tensor([quiet, signalling, lowest, 1], dtype=integer)
        flat[4:8] = flat[0:4] | lowest
        flat[8:10] = torch.tensor([float("inf"), float("-inf")], dtype=dtype).view(integer)
    experts = {
        "all": mask_of({w.name: torch.arange(w.size) for w in weights}, weights),
        "few": mask_of({w.name: torch.arange(9) for w in weights}, weights),
    }
    check_switching(model, weights, ["all", "few", "all", "few"], experts=experts)
    with switched_off(weights, experts["all"]):
        assert all((w.parameter.view(integer) == 0).all() for w in weights)


@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_oss"])
def test_many_blocks_do_the_same(monkeypatch, case):
    monkeypatch.setattr(switchboard, "_BLOCK_BYTES", 4 * 300)
    model, weights = model_and_weights(case)
    experts = experts_of(weights, (0.1, 0.3, 0.001))
    board = check_switching(model, weights, ["e0", "e1", "e2", "e0", "e2"], experts=experts)
    assert all(len(blocks) == -(-w.size // 300) for w, blocks in zip(weights, board._blocks, strict=True))


def test_threads_do_the_same(monkeypatch):
    seen, pool = [], threads.ThreadPoolExecutor
    monkeypatch.setattr(switchboard, "_WORTH_THREADS", 0)
    monkeypatch.setattr(threads, "ThreadPoolExecutor", lambda n: seen.append(n) or pool(n))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    model = tiny_model("mixtral")
    check_switching(model, find_weights(model), ["e0", "e1", "e2", "e0"])
    assert seen == [3] * 5


def test_a_device_that_is_not_the_cpu_adds_by_index(monkeypatch):
    """The other way of adding, on the CPU: places and values are the same."""
    part = switchboard._ExpertBlock(torch.tensor([1, 4, 5], dtype=torch.int32), torch.tensor([-7, 3, -(2**31)]).int())

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    there = torch.tensor([[9, -7, 9, 9, 3, -(2**31)]]).int()
    part.add(there.as_subclass(Elsewhere), -1)
    assert there.tolist() == [[9, 0, 9, 9, 0, 0]]
    part.add(there.as_subclass(Elsewhere), 1)
    assert there.tolist() == [[9, -7, 9, 9, 3, -(2**31)]]
    assert part.row is None


def test_others_may_edit_in_between(llama, weights, experts, board, masked):
    board.activate_expert("e0")
    with switched_off(weights, experts["e1"]):
        pass
    board.activate_expert("e2")
    assert unchanged(llama, masked["e2"])
    board.activate_expert("e0")
    with torch.no_grad():
        for weight in weights:
            weight.parameter.view(-1)[experts["e0"][weight.name].indices()] = 3.0
    for name in ("e1", None):
        board.activate_expert(name)
        assert unchanged(llama, masked[name])
    # Another base in the same memory: what the board knew is read anew.
    llama.load_state_dict(tiny_model("llama", seed=5).state_dict())
    others = all_expected(llama, weights, experts)
    assert any(not torch.equal(v, masked[None][k]) for k, v in others[None].items())
    for name in ("e2", "e1", "e0", None):
        board.activate_expert(name)
        assert unchanged(llama, others[name])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9, 16, 27])
def test_broken_off_anywhere_it_is_the_base_again(llama, board, masked, monkeypatch, error, after):
    if after % 2:
        board.activate_expert("e1")
    board.activate_expert("e0")
    add, calls = switchboard._ExpertBlock.add, []

    def breaking(part, bits_, times):
        if len(calls) == after:
            raise error
        calls.append(times)
        add(part, bits_, times)

    with monkeypatch.context() as patch:
        patch.setattr(switchboard._ExpertBlock, "add", breaking)
        with pytest.raises(error):
            board.activate_expert("e1")
    assert board.active_expert is None
    assert unchanged(llama, masked[None])
    for name in ("e1", "e0", None):
        board.activate_expert(name)
        assert unchanged(llama, masked[name])


def test_broken_off_twice(llama, board, monkeypatch):
    before = bits(llama)
    board.activate_expert("e0")
    board.activate_expert("e1")
    broken = Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(switchboard._ExpertBlock, "restore_values", broken)
        patch.setattr(switchboard._ExpertBlock, "add", broken)
        with pytest.raises(KeyboardInterrupt):
            board.activate_expert("e0")
    board.activate_expert(None)
    assert unchanged(llama, before)


def test_a_model_made_under_inference_mode():
    with torch.inference_mode():
        model = tiny_model("llama")
    check_switching(model, find_weights(model), ["e0", "e1", "e0"])


def test_a_parameter_that_is_not_contiguous(llama):
    for layer in llama.model.layers:
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.t().contiguous().t()
    down = llama.model.layers[0].mlp.down_proj.weight
    # A part of a larger tensor: what stands between its rows belongs to others.
    room = torch.full((64, 48), 9.0)
    down.data = room[::2].copy_(down.data)
    weights = find_weights(llama, "mlp")
    assert not any(w.parameter.is_contiguous() for w in weights[1:3])
    check_switching(llama, weights, ["e0", "e1"])
    assert bool((room[1::2] == 9).all())


def test_weights_that_move_take_their_expert_along(llama, weights):
    """As on the way to another device: the same numbers, elsewhere in memory."""

    def move():
        for weight in weights:
            weight.parameter.data = weight.parameter.data.clone()

    check_switching(llama, weights, ["e0", "e1", "e0", "e2"], move)


def test_the_type_of_numbers_must_stay_under_an_expert(llama, weights, experts, board):
    board.activate_expert("e0")
    board.activate_expert(None)
    llama.to(torch.bfloat16)
    masked = expected(llama, weights, experts["e0"])
    board.activate_expert("e0")
    assert unchanged(llama, masked)
    llama.to(torch.float16)
    with pytest.raises(DataError, match=r"changed their type while expert 'e0'.*q_proj"):
        board.activate_expert(None)


def test_what_is_held():
    weights = find_weights(tiny_model("llama").to(torch.bfloat16))
    experts = experts_of(weights, (0.1,))
    board = board_of(weights, experts)
    off = sum(len(p) for p in experts["e0"].values())
    assert board.held_bytes("e0") == 4 * off
    board.activate_expert("e0")
    assert board.held_bytes("e0") == 6 * off
    # The sparse matrices that torch adds are views of the same memory.
    for part in itertools.chain(*board._experts["e0"].blocks):
        assert part.row.col_indices().data_ptr() == part.places.data_ptr()
        assert part.row.values().data_ptr() == part.values.data_ptr()
    assert "e0" in board
    with pytest.raises(DataError, match="'e0' is switched in"):
        board.remove_expert("e0")
    with pytest.raises(DataError, match="'e0' is switched in"):
        board.add_expert("e0", Mask())
    board.activate_expert(None)
    board.remove_expert("e0")
    assert "e0" not in board


def test_learning_anew_replaces(llama, experts, board, masked):
    for name in ("e0", "e1"):
        board.add_expert("a", experts[name])
        board.activate_expert("a")
        assert unchanged(llama, masked[name])
        board.activate_expert(None)


def test_an_expert_that_switches_nothing_off(llama, weights, experts):
    check_switching(llama, weights, ["e0", "nothing"], experts={**experts, "nothing": Mask()})


def test_bad_input(weights, board):
    with pytest.raises(DataError, match=r"'x' was never learned\. Known: e0, e1, e2"):
        board.activate_expert("x")
    with pytest.raises(MaskError, match="of 9 weights"):
        board.add_expert("x", Mask({weights[0].name: TensorMask.of_indices(torch.tensor([3]), 9)}))
    assert "x" not in board
    with pytest.raises(MaskError, match=r"'model\.x'"):
        board.add_expert("x", Mask({"model.x": TensorMask.of_indices(torch.tensor([3]), 9)}))


def test_what_was_not_used_for_longest_goes_when_room_is_short(llama, weights):
    masks = {name: some(weights, 0.1, seed) for seed, name in enumerate("abcd")}
    each = 8 * max(mask.count for mask in masks.values())
    board = ExpertCache(weights, most_bytes=2 * each)
    before, masked = bits(llama), expected(llama, weights, masks["d"])
    # What is switched in stays, however long ago that was.
    for name, held in (("a", "a"), ("b", "ab"), ("c", "ac"), ("d", "ad")):
        board.add_expert(name, masks[name])
        if name == "a":
            board.activate_expert("a")
        assert [n for n in masks if n in board] == list(held)
    board.activate_expert("d")
    assert unchanged(llama, masked)
    board.add_expert("b", masks["b"])
    assert [n for n in masks if n in board] == ["b", "d"]
    board.activate_expert(None)
    assert unchanged(llama, before)
    assert sum(board.held_bytes(n) for n in masks if n in board) <= 2 * each


def test_one_expert_that_is_larger_than_the_room_is_held_all_the_same(weights):
    board = ExpertCache(weights, most_bytes=0)
    for seed, name in enumerate("ab"):
        board.add_expert(name, some(weights, 0.1, seed))
        board.activate_expert(name)
        assert board.active_expert == name
    board.add_expert("c", some(weights, 0.1, 2))
    assert [n for n in "abc" if n in board] == ["b", "c"]
