"""Learned switches the slow, obvious way: dense vectors, and autograd through an explicit mask."""

import math

import torch

from freemoe.domain_experts.batches import mean_loss
from freemoe.domain_experts.learned import draw
from freemoe.domain_experts.switching import switched_off


def straight_through(model, weights, mask, rows):
    """dL/ds by autograd through w * m, where m is 0 or 1 going forward and s going backward; canonical and flat."""
    scores, replaced = [], {}
    for weight in weights:
        hard = torch.ones(weight.size)
        hard[mask.get(weight.name, torch.empty(0, dtype=torch.long))] = 0
        score = torch.zeros(weight.size, requires_grad=True)
        soft = (hard + score - score.detach()).reshape(weight.shape)
        shaped = soft.transpose(1, 2) if weight.layout.endswith("columns") else soft
        replaced[weight.name] = weight.parameter.detach() * shaped.reshape(weight.parameter.shape)
        scores.append(score)
    total, tokens = torch.zeros(()), 0
    for batch in rows:
        logits = torch.func.functional_call(model, replaced, (), {"input_ids": batch.ids}).logits
        keep = batch.targets != -100
        total = total - torch.log_softmax(logits[keep], -1)[range(int(keep.sum())), batch.targets[keep]].sum()
        tokens += int(keep.sum())
    found = torch.autograd.grad(total / tokens, scores, allow_unused=True)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(scores, found, strict=True)]


def slow_learn(model, weights, gradient, stop, *, budget, candidates, steps, step_tokens, every):
    """The same training on dense vectors, with autograd through an explicit mask; without an early end."""
    sizes = [w.size for w in weights]
    total = sum(sizes)
    most, number = int(budget * total), int(candidates * total)

    def named(numbers):
        chosen = torch.zeros(total, dtype=torch.bool)
        chosen[numbers] = True
        parts = chosen.split(sizes)
        return {w.name: p.nonzero().flatten() for w, p in zip(weights, parts, strict=True) if p.any()}

    def slope(mask, rows):
        return torch.cat(straight_through(model, weights, named(mask), rows))

    empty = torch.empty(0, dtype=torch.long)
    start = slope(empty, gradient)
    ranked = torch.argsort(start, descending=True)[:number]
    inside = torch.zeros(total, dtype=torch.bool)
    inside[ranked[start[ranked] > 0]] = True
    score, mean, square, watched = (torch.zeros(total) for _ in range(4))
    mask, losses, masks = empty, [mean_loss(model, stop)], [{}]
    drawn = draw(gradient, step_tokens, 0)
    for step in range(1, steps + 1):
        g = slope(mask, next(drawn))
        watched += torch.where(torch.isin(torch.arange(total), mask), torch.zeros(total), g)
        mean = torch.where(inside, 0.9 * mean + 0.1 * g, 0.0)
        square = torch.where(inside, 0.999 * square + 0.001 * g * g, 0.0)
        size = square / (1 - 0.999**step)
        floor = math.sqrt(float(size.sum()) / int(inside.sum()))
        pace = (1 + math.cos(math.pi * step / steps)) / 2 / (1 - 0.9**step)
        score = torch.where(inside, score - pace * mean / (size.sqrt() + floor), 0.0)
        allowed = math.ceil(most * (1 - max(0.0, 1 - step / (steps / 6)) ** 3))
        ranked = torch.argsort(score)[:allowed]
        mask = ranked[score[ranked] < 0]
        if step % every:
            continue
        with switched_off(weights, named(mask)):
            losses.append(mean_loss(model, stop))
        masks.append(named(mask))
        if step <= 0.7 * steps:
            ranked = torch.argsort(torch.where(inside, -math.inf, watched), descending=True)[: number // 2]
            fresh = ranked[watched[ranked] > 0]
            fresh = fresh[~inside[fresh]]
            held = inside.nonzero().flatten()
            keep = held[torch.argsort(score[held])[: max(most, len(held) - min(len(held) // 2, len(fresh)))]]
            inside[:] = False
            inside[keep] = True
            score, mean, square = (torch.where(inside, x, 0.0) for x in (score, mean, square))
            inside[fresh] = True
        watched = torch.zeros(total)
    return losses, masks
