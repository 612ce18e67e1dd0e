"""Learned switches the slow, obvious way: dense vectors, and autograd through an explicit mask."""

import math

import torch

from freemoe.domain_experts.purify.batches import mean_loss
from freemoe.domain_experts.purify.curvature import measure_curvature
from freemoe.domain_experts.purify.learned import draw_steps
from freemoe.models.switching import switched_off
from tests.masks import mask_of


def masked_gradients(model, weights, mask, rows):
    """dL/d(w * m) by autograd through a product with an explicit mask of ones and zeros; canonical and flat."""
    products, replaced = [], {}
    for weight in weights:
        ones = torch.ones(weight.size)
        ones[mask.get(weight.name, torch.empty(0, dtype=torch.long))] = 0
        product = (weight.canonical_view() * ones.reshape(weight.shape)).requires_grad_(True)
        shaped = product.transpose(1, 2) if weight.layout.endswith("columns") else product
        replaced[weight.name] = shaped.reshape(weight.parameter.shape)
        products.append(product)
    total, tokens = torch.zeros(()), 0
    for batch in rows:
        logits = torch.func.functional_call(model, replaced, (), {"input_ids": batch.ids}).logits
        keep = batch.targets != -100
        total = total - torch.log_softmax(logits[keep], -1)[range(int(keep.sum())), batch.targets[keep]].sum()
        tokens += int(keep.sum())
    found = torch.autograd.grad(total / tokens, products, allow_unused=True)
    return [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(products, found, strict=True)]


def slow_learn(model, weights, gradient, stop, *, budget, steps, step_tokens, every, seed=0):
    """The same training on dense vectors, with autograd through an explicit mask; without an early end.

    Returns:
        The stopping losses, the masks they belong to, and the pace after every step.
    """
    sizes = [w.size for w in weights]
    total = sum(sizes)

    def named(mask):
        return {w.name: p.nonzero().flatten() for w, p in zip(weights, mask.split(sizes), strict=True) if p.any()}

    drawn = draw_steps(gradient, min(step_tokens, sum(b.answer_tokens for b in gradient) // 8), seed)
    curvature = measure_curvature(model, weights, [*next(drawn), *next(drawn)])
    h = torch.cat([curvature.weight_curvature(w).flatten() for w in weights])
    own = torch.cat([w.canonical_view().reshape(-1) for w in weights])
    cost = own.abs() * h.sqrt()
    unit = float(cost.sort().values[round(0.1 * total) - 1])
    evidence, mean = torch.zeros(total), torch.zeros(total)
    change = torch.zeros(total)
    mask = torch.zeros(total, dtype=torch.bool)
    pace, growing, trend = 0.2, True, None
    losses, masks, paces = [mean_loss(model, stop)], [{}], []
    standing, kept, tokens = losses[0], torch.zeros(total), sum(b.answer_tokens for b in gradient)
    each = min(step_tokens, tokens // 8)

    def hardest(evidence):
        score = own * evidence - own**2 * h
        best = torch.argsort(score, descending=True, stable=True)[: int(budget * total)]
        new = torch.zeros_like(mask)
        new[best[score[best] > 0]] = True
        return new

    for step in range(1, steps + 1):
        rows = next(drawn)
        g = torch.cat(masked_gradients(model, weights, named(mask), rows))
        rate = pace * (1 + math.cos(math.pi * step / steps)) / 2
        rate *= unit * math.sqrt(sum(b.answer_tokens for b in rows)) / (1 - 0.9**step)
        if mask.any():
            slope = float((g * change).sum())
            trend = slope if trend is None else (trend + slope) / 2
            growing = growing and trend < 0
            # What a step learns of the last one counts from the next one on.
            pace = pace * 1.2 if growing else pace
        mean = 0.9 * mean + 0.1 * g
        growing = growing and step * each < tokens
        evidence = evidence + rate * mean
        new = hardest(evidence)
        change = (mask.float() - new.float()) * own
        mask = new
        if step % every == 0 or step == steps:
            with switched_off(weights, mask_of(named(mask), weights)):
                losses.append(mean_loss(model, stop))
            masks.append(named(mask))
            if losses[-1] > standing:
                pace, growing = pace / 2, False
            standing = losses[-1]
            if losses[-1] == min(losses):
                kept = evidence
            elif losses[-1] - min(losses) > 0.05 * (losses[0] - min(losses)):
                evidence, mean = kept, torch.zeros(total)
                new = hardest(evidence)
                change = (mask.float() - new.float()) * own
                mask, standing = new, min(losses)
        paces.append(pace)
    return losses, masks, paces
