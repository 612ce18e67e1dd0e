"""The pretended accelerator itself: it computes what the CPU does, refuses what CUDA refuses, and counts where the host waits."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

HERE = torch.device("pretend", 0) if hasattr(torch, "pretend") else torch.device("cpu")
pytestmark = pytest.mark.usefixtures("pretend_accelerator")


def ones(*shape, device=HERE):
    return torch.ones(*shape, device=device)


@pytest.mark.parametrize(
    "careless",
    [
        lambda: ones(3) + ones(3, device="cpu"),
        lambda: ones(3) + ones(3, device="pretend:1"),
        lambda: ones(3).lerp_(ones(3, device="cpu"), 0.5),
        lambda: ones(3).index_add_(0, torch.tensor([1]), ones(1)),
        lambda: ones(3, device="cpu").add_(ones(3)),
        lambda: ones((), device="cpu").add_(ones(())),
        lambda: ones(3, device="cpu")[ones(1).long()],
        lambda: torch.cat([ones(3), ones(3, device="cpu")]),
        lambda: nn.Linear(3, 2)(ones(3)),
        lambda: ones(3).normal_(generator=torch.Generator()),
        lambda: ones(3).numpy(),
    ],
)
def test_what_cuda_refuses_is_refused(careless):
    with pytest.raises((RuntimeError, TypeError), match=r"device|generator of the CPU"):
        careless()


def test_numbers_and_indices_of_the_host_may_meet_its_tensors():
    x = torch.arange(6.0, device=HERE).view(2, 3)
    torch.testing.assert_close((x * torch.tensor(2.0) + 1)[torch.tensor([1])].cpu(), torch.tensor([[7.0, 9.0, 11.0]]))
    x[torch.tensor([0])] = torch.tensor(5.0)
    assert x.tolist() == [[5.0, 5.0, 5.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("asks", "times"),
    [
        (lambda x: float(x.sum()), 1),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.__setitem__(x > 0, ones(3)), 1),
        (lambda x: x[torch.tensor([0])], 1),
        (lambda x: torch.tensor([1.0], device=x.device), 1),
        (lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.long)), 1),
        (lambda x: torch.linalg.eigh(torch.diag(x)), 1),
        (lambda x: x.copy_(ones(3, device="cpu"), non_blocking=True), 0),
        (lambda x: x.masked_fill_(x > 0, 2.0).sort().values.cumsum(0)[:2] @ torch.zeros(2, device=x.device), 0),
        (lambda x: x.__setitem__(x > 0, 3.0), 0),
        (lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.long), output_size=3), 0),
        (lambda x: torch.where(x > 0, x, 0).topk(2), 0),
    ],
)
def test_the_host_waits_for_what_it_reads(asks, times, pretend_accelerator):
    x = ones(3)
    with pretend_accelerator.waits() as count:
        asks(x)
    assert count.total == times, count
    assert all(line.startswith("accelerator/test_pretend_accelerator.py:") for _, line in count.places)
    asks(x)
    assert count.total == times


def test_waits_of_the_backward_pass_have_a_place_too(pretend_accelerator):
    x = ones(3).requires_grad_()
    x.register_hook(lambda gradient: bool(gradient.any()) and None)
    with pretend_accelerator.waits() as count:
        x.sum().backward()
    assert [(what, line.partition(":")[0]) for what, line in count.places] == [
        ("local_scalar_dense", "accelerator/test_pretend_accelerator.py")
    ]


def test_errors_of_the_backward_pass_are_raised(pretend_accelerator):
    for _ in range(3):
        x = ones(3).requires_grad_()
        x.register_hook(lambda gradient: gradient + ones(3, device="cpu"))
        with pytest.raises(RuntimeError, match="device"):
            (x.exp() * 2).sum().backward()


@pytest.mark.parametrize("number", [0, 1])
def test_training_there_is_training_here(number):
    torch.manual_seed(0)
    here = nn.ModuleList([nn.Linear(4, 6), nn.LayerNorm(6), nn.GRU(6, 5, bidirectional=True)])
    there = copy.deepcopy(here).to(f"pretend:{number}")
    parameters = [p for m in (here, there) for p in m.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    x = torch.randn(7, 3, 4)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = [m[2](m[1](m[0](x.to(m[0].weight.device))))[0].square().sum() for m in (here, there)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        found.append([loss.item() for loss in losses])
    torch.testing.assert_close(torch.tensor(found)[:, 0], torch.tensor(found)[:, 1])
    assert found[-1][0] < found[0][0]
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert b.device == torch.device("pretend", number)
        torch.testing.assert_close(a, b.cpu(), atol=1e-4, rtol=1e-4)


def test_views_share_their_memory_and_outputs_are_given_the_shape():
    x = torch.zeros(2, 3, 2, device=HERE)
    torch.view_as_complex(x).mul_(0).add_(1 + 2j)
    x.transpose(0, 1)[1].fill_(7)
    x.view(-1)[0] = 9
    assert x.cpu().flatten().tolist() == [9, 2, 7, 7, 1, 2, 1, 2, 7, 7, 1, 2]
    out = torch.empty(0, device=HERE)
    torch.sum(x, 2, out=out)
    assert out.cpu().tolist() == [[11, 14, 3], [3, 14, 3]]
    assert (nn.functional.linear(x[0, 0], torch.eye(2, device=HERE)) + x[1, 0]).tolist() == [10, 4]
    assert copy.deepcopy(out[1]).tolist() == [3, 14, 3]
    assert out.resize_(2).cpu().tolist() == [11, 14]


def test_complex_numbers_have_gradients():
    found = []
    for device in ("cpu", HERE):
        x = torch.arange(8.0).view(4, 2).to(device).requires_grad_()
        turned = torch.view_as_complex(x) * torch.polar(ones(4, device=device), ones(4, device=device))
        (torch.view_as_real(turned)[:, 0].square().sum() + turned.conj().imag.sum()).backward()
        found.append(x.grad.cpu())
    torch.testing.assert_close(*found)
    assert found[0].any()


def test_what_a_file_holds_is_read_to_the_host(tmp_path):
    save_file({"x": ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(RuntimeError, match="device"):
        ones(3).add_(load_file(tmp_path / "x.safetensors")["x"])


def test_a_seed_draws_the_same():
    one, other = (torch.Generator(device).manual_seed(3) for device in (HERE, "cpu"))
    assert one.device == HERE
    assert torch.equal(torch.randn(4, generator=one, device=HERE).cpu(), torch.randn(4, generator=other))
