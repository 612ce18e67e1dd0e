"""Hooks stand while their block is open, in the order of the blocks, and never longer."""

import gc
import weakref

import pytest
import torch
from torch import nn

from freemoe.models.hooks import (
    combined_hooks,
    forward_hook,
    forward_pre_hook,
    has_hooks,
    has_hooks_after,
    hooks_disabled,
    on_gradient,
    post_accumulate_grad_hook,
)

X = torch.arange(6.0).view(2, 3)


@pytest.fixture
def linear():
    made = nn.Linear(3, 2)
    yield made
    assert not has_hooks(made)
    assert not made.weight._post_accumulate_grad_hooks


def test_see_and_change_what_goes_in_and_comes_out(linear):
    seen, plain = [], linear(X)
    with forward_pre_hook(linear, lambda module, args: seen.append((module, args))):
        assert torch.equal(linear(X), plain)
    with forward_pre_hook(linear, lambda module, args: (args[0] * 2,)):
        assert torch.equal(linear(X), linear.forward(X * 2))
    with forward_hook(linear, lambda module, args, output: output + 1):
        assert torch.equal(linear(X), plain + 1)
    with forward_hook(linear, lambda module, args, output: None):
        assert torch.equal(linear(X), plain)
    assert torch.equal(linear(X), plain)
    ((module, args),) = seen
    assert module is linear
    assert args == (X,)


def test_arguments_by_name(linear):
    seen = []
    with (
        forward_pre_hook(linear, lambda module, args, kwargs: seen.append((args, list(kwargs))), kwargs=True),
        forward_hook(linear, lambda module, args, kwargs, output: seen.append((args, list(kwargs))), kwargs=True),
    ):
        linear(input=X)
    assert seen == [((), ["input"])] * 2


def test_they_run_in_the_order_in_which_they_were_opened(linear):
    seen = []

    def say(what):
        return lambda *_: seen.append(what)

    with (
        forward_hook(linear, say("after 1")),
        combined_hooks(
            forward_pre_hook(linear, say("before 1")),
            forward_hook(linear, say("after 2")),
            forward_pre_hook(linear, say("before 2")),
        ),
        forward_pre_hook(linear, say("before 3")),
    ):
        linear(X)
    assert seen == ["before 1", "before 2", "before 3", "after 1", "after 2"]


@pytest.mark.parametrize(
    "where",
    [forward_pre_hook, forward_hook, lambda linear, hook: post_accumulate_grad_hook(linear.weight, hook)],
    ids=["before", "after", "gradient"],
)
def test_gone_after_an_error(linear, where):
    with pytest.raises(ZeroDivisionError), where(linear, lambda *_: 1 / 0):
        linear(X).sum().backward()
    linear(X).sum().backward()


def test_none_stands_before_the_block_is_open_or_when_a_later_one_cannot_be_opened(linear):
    impossible = post_accumulate_grad_hook(torch.zeros(2), print)
    later = combined_hooks(forward_pre_hook(linear, print), forward_hook(linear, print), impossible)
    assert not has_hooks(linear)
    with pytest.raises(RuntimeError, match="require"), later:
        pytest.fail("the block was entered")
    assert not has_hooks(linear)


def test_gradients_as_they_have_been_added(linear):
    seen = []

    def take(parameter):
        seen.append(parameter.grad)
        parameter.grad = None

    with post_accumulate_grad_hook(linear.weight, take):
        linear(X).sum().backward()
        assert linear.weight.grad is None
    linear(X).sum().backward()
    assert torch.equal(linear.weight.grad, seen[0])
    assert len(seen) == 1


def test_the_gradient_of_an_activation(linear):
    seen = []
    y = linear(X)
    on_gradient(y, seen.append)
    on_gradient(y, lambda gradient: gradient * 2)
    y.sum().backward()
    assert torch.equal(seen[0], torch.ones(2, 2))
    assert torch.equal(linear.bias.grad, torch.full((2,), 4.0))


def test_a_hook_on_a_gradient_goes_with_its_tensor(linear):
    y = linear(X)
    on_gradient(y, lambda gradient: None)
    gone = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert gone() is None
    finally:
        gc.enable()


def test_hooks_rest_and_come_back(linear):
    seen = []
    with (
        forward_pre_hook(linear, lambda *_: seen.append("before")),
        forward_hook(linear, lambda *_: seen.append("after")),
    ):
        with hooks_disabled(linear):
            linear(X)
        assert seen == []
        with hooks_disabled(linear, inputs=False):
            linear(X)
        assert seen == ["before"]
        with pytest.raises(RuntimeError, match="on purpose"), hooks_disabled(linear):
            raise RuntimeError("on purpose")
        linear(X)
    assert seen == ["before", "before", "after"]


def test_a_hook_that_goes_while_it_rests_does_not_come_back(linear):
    hook = forward_hook(linear, print)
    hook.__enter__()
    with hooks_disabled(linear):
        hook.__exit__(None, None, None)
    assert not has_hooks(linear)


def test_which_hooks_stand(linear):
    assert not has_hooks(linear)
    with forward_pre_hook(linear, print):
        assert (has_hooks(linear), has_hooks_after(linear)) == (True, False)
    with forward_hook(linear, print):
        assert has_hooks_after(linear)
    handle = linear.register_full_backward_hook(lambda *_: None)
    assert has_hooks(linear)
    handle.remove()
