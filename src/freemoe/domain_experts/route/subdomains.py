"""Features of documents and the subdomains of a domain (MoDE Eq. 3-4).

Shapes: D documents, H feature size, K subdomains.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import DataError, NumericError
from freemoe.domain_experts.recipe import SubdomainSection
from freemoe.evals.tasks.documents import Document, ReferenceSplit, require_reference
from freemoe.recipes.expert_names import make_names

_DOCUMENTS_PER_CLUSTER = 40
_MOST_CLUSTERS = 8
_TYPICAL = 12  # more than are shown, as some say the same


@torch.no_grad()
def prompt_feature(model: Any, ids: Sequence[int] | Tensor, kind: str = "embedding") -> Tensor:
    """Feature of one prompt: the mean of its tokens' embedding vectors, ``(H,)`` fp32.

    Ids have no padding and no special tokens; ``kind`` is ``embedding`` (MoDE) or ``hidden``: the mean state in the middle
    of the network.
    """
    tokens = torch.as_tensor(ids, device=model.device).long()
    if not len(tokens):
        return torch.zeros(model.get_input_embeddings().weight.shape[1], device=model.device)
    if kind == "hidden":
        states = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True).hidden_states
        return states[len(states) // 2][0].float().mean(0)
    return model.get_input_embeddings()(tokens).float().mean(0)


def prompt_features(model: Any, prompts: Sequence[Sequence[int]], kind: str = "embedding") -> Tensor:
    """Features of many prompts, ``(D, H)`` fp32 on the CPU; equal prompts are computed once."""
    known: dict[tuple[int, ...], Tensor] = {}
    rows = []
    for ids in prompts:
        key = tuple(ids)
        if key not in known:
            known[key] = prompt_feature(model, key, kind).cpu()
        rows.append(known[key])
    found = torch.stack(rows)
    if not bool(found.isfinite().all()):
        raise NumericError(
            "The features of prompts have NaN or infinity, so that nothing can be grouped or routed by them: the base's embeddings, "
            "or its states, are too large for float32. Check the base, or copy it again."
        )
    return found


@dataclass(frozen=True, eq=False)
class DomainDivision:
    """The subdomains of one domain."""

    domain: str  # Name of the domain
    names: tuple[str, ...]  # Name of each subdomain, ``DOMAIN/...``
    labels: tuple[int, ...]  # Subdomain of each reference document
    centroids: Tensor  # ``(K, H)`` mean feature of each
    by: str
    groups: dict[str, int]  # With ``by: task`` and ``by: field``, which group of documents each subdomain is
    notes: tuple[str, ...] = ()  # What was merged, in words
    # Of each, the reference documents nearest to its centroid, the nearest first
    typical: tuple[tuple[int, ...], ...] = ()

    def assign_documents(self, documents: Sequence[Document], feature: Tensor) -> list[int]:
        """Known subdomain of other documents: their own group, or the nearest centroid (MoDE Eq. 4)."""
        nearest: list[int] = torch.cdist(feature.double(), self.centroids.double()).argmin(1).tolist()
        return [self.groups.get(_group_key(d, self.by), near) for d, near in zip(documents, nearest, strict=True)]


def _group_key(document: Document, by: str) -> str:
    return document.task if by == "task" else (document.field or document.task) if by == "field" else ""


def divide_domain(
    domain: str, split: ReferenceSplit, feature: Tensor, section: SubdomainSection, seed: int
) -> DomainDivision:
    """Divide a domain's reference documents into subdomains. Features are ``(D, H)``.

    Raises:
        DataError: When more clusters are asked for than there are documents.
    """
    documents = require_reference(split, "Dividing a domain").documents
    count = section.count.get(domain) if isinstance(section.count, dict) else section.count
    if section.by in ("task", "field"):
        keys = [_group_key(d, section.by) for d in documents]
        groups = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        labels = np.array([groups[key] for key in keys])
        names = list(groups)
    elif (
        section.by == "none"
        or count == 1
        or (count is None and documents[0].kind == "text" and not documents[0].prompt)
    ):
        # One text is one domain unless told otherwise: its expert needs all the text there is.
        labels, names, groups = np.zeros(len(documents), dtype=int), ["all"], {}
    else:
        wanted = count or max(1, min(_MOST_CLUSTERS, len(documents) // _DOCUMENTS_PER_CLUSTER))
        if wanted > len(documents):
            raise DataError(
                f"Domain {domain!r} has {len(documents)} reference documents, fewer than the {wanted} clusters asked for. "
                f"Ask for at most {max(1, len(documents) // section.min_size)} (--subdomains), or raise --limit."
            )
        labels = _kmeans_labels(feature.numpy(), wanted, section.initialisations, seed)
        names, groups = [str(i) for i in range(int(labels.max()) + 1)], {}
    labels, kept, notes = merge_small(feature.numpy(), labels, names, section.min_size)
    centroids = torch.stack([feature[torch.from_numpy(labels == k)].mean(0) for k in range(len(kept))])
    merged = {
        key: int(labels[next(i for i, d in enumerate(documents) if _group_key(d, section.by) == key)]) for key in groups
    }
    typical = []
    for k, centre in enumerate(centroids):
        members = np.flatnonzero(labels == k)
        apart = (feature[torch.from_numpy(members)].double() - centre.double()).norm(dim=1).numpy()
        typical.append(tuple(members[np.argsort(apart, kind="stable")[:_TYPICAL]].tolist()))
    return DomainDivision(
        domain,
        tuple(f"{domain}/{name}" for name in make_names(kept)),
        tuple(int(x) for x in labels),
        centroids,
        section.by,
        merged,
        tuple(f"{domain}: {note}" for note in notes),
        tuple(typical),
    )


def _kmeans_labels(feature: np.ndarray, count: int, initialisations: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Fewer distinct prompts than clusters: k-means says so and returns fewer, which is what we want.
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = KMeans(count, n_init=initialisations, random_state=seed)  # pyright: ignore[reportArgumentType]
        found = clusters.fit_predict(feature.astype(np.float64))
    index: dict[int, int] = {}
    return np.array([index.setdefault(int(x), len(index)) for x in found])


def merge_small(
    feature: np.ndarray, labels: np.ndarray, names: Sequence[str], min_size: int
) -> tuple[np.ndarray, list[str], list[str]]:
    """Merge groups of fewer than ``min_size`` documents into the nearest one, the smallest first.

    Features are ``(D, H)``; ``labels`` ``(D,)`` are numbers of ``names``. Gives new labels without gaps, the names that are
    left, and a line per merge.
    """
    labels = labels.copy()
    alive = [k for k in range(len(names)) if (labels == k).any()]
    notes = []
    while len(alive) > 1:
        sizes = {k: int((labels == k).sum()) for k in alive}
        smallest = min(alive, key=lambda k: (sizes[k], k))
        if sizes[smallest] >= min_size:
            break
        centre = feature[labels == smallest].mean(0)
        others = [k for k in alive if k != smallest]
        nearest = min(others, key=lambda k: float(np.linalg.norm(feature[labels == k].mean(0) - centre)))
        notes.append(
            f"subdomain {names[smallest]!r} has {sizes[smallest]} documents, fewer than {min_size}: merged into "
            f"{names[nearest]!r}"
        )
        labels[labels == smallest] = nearest
        alive = others
    index = {k: i for i, k in enumerate(alive)}
    return np.array([index[int(x)] for x in labels]), [names[k] for k in alive], notes
