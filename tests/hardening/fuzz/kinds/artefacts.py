"""Artefacts of build and trim that were edited. A checksum is no signature: it is made right again, most of the time.

Accepted is what says what it is: every expert of the manifest, of a kind that there is, with the tensors of the file and no
others, doing to the base exactly what its numbers say; and what it says of its base is what the base is.
"""

import contextlib
import copy
import json
import math

import torch
from hypothesis import strategies as st

from freemoe.core.artifacts import MANIFEST
from freemoe.core.errors import ArtifactError, FreeMoEError
from freemoe.core.run.folder import require_replaceable
from freemoe.domain_experts.artefact import inspect_artefact
from freemoe.domain_experts.hosting.merging import merge
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.hookmoe.adapter import load_trimmed
from freemoe.hookmoe.artefact_files import CONFIG, WEIGHTS
from tests.hardening.fuzz.case import require
from tests.hardening.fuzz.drawing import SHAPES, TEXTS, byte_edits, json_edits, rarely, tensor_edits, wild_edits
from tests.hardening.fuzz.editing import edited_copy, read_plain
from tests.hardening.fuzz.material import logits, write_again
from tests.hardening.fuzz.reference import off_of

IDENTITY = ("base_fingerprint", "base_identity")
"""Of the manifest: what says which base it is."""

_FILES = {"experts": ("experts.safetensors", "router.safetensors"), "trimmed": (WEIGHTS,)}
_OWN = ("notes.txt", ".hidden", "experts.safetensors.bak", "manifest.json~", "report/mine.md", "\u202eabc", "x y.log")
"""Files that a user may keep in an artefact."""
_KINDS = ("base", "band", "switch", "unit")
_FIELDS = (("experts",), ("experts", "0"), ("experts", "0", "name"), ("router",), ("router", "domains"))


def strategy(material):
    """Which artefact, its edits, whether its checksums are made right again, and a file of the user's own in it."""

    def of(name):
        folder = material.folder / name
        manifest = json_edits(folder, MANIFEST)
        ours = st.one_of(*(tensor_edits(folder, file) for file in _FILES[name]))
        wild = wild_edits({(MANIFEST, *path): (*SHAPES, *TEXTS) for path in _FIELDS})
        more = [json_edits(folder, CONFIG)] * 2 if name == "trimmed" else [wild]
        anything = st.one_of(*(byte_edits(folder, file) for file in (MANIFEST, *_FILES[name])))
        edits = st.lists(st.one_of(manifest, manifest, ours, ours, *more, anything), min_size=1, max_size=3)
        again = rarely(10).map(lambda seldom: not seldom)
        own = rarely(10).flatmap(lambda there: st.sampled_from(_OWN) if there else st.none())
        return st.builds(lambda e, a, o: {"artefact": name, "edits": e, "again": a, "own": o}, edits, again, own)

    return st.one_of(of("experts"), of("experts"), of("trimmed"))


def warm(material):
    logits(material.mixture, material.probes)
    assert len(material.answers)


def attempt(what, material, folder):
    """Open an edited artefact on its base, and hold it against what its files say."""
    before = json.loads((material.folder / what["artefact"] / MANIFEST).read_text(encoding="utf-8"))
    own = edited_copy(material.folder / what["artefact"], folder / "artefact", what["edits"])
    told = _manifest(own)
    if what["again"] and told is not None:
        write_again(own, told)
    if what.get("own"):
        _require_kept(own, what["own"])
    if what["artefact"] == "experts":
        _listed(own)
        _experts(own, material)
    else:
        _trimmed(own, material)
    # It was accepted, so it can be read.
    _require_same_base(json.loads((own / MANIFEST).read_text(encoding="utf-8")), before)


def _require_kept(folder, name):
    """An artefact with a user's own file in it is not replaced, also where that was allowed."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine", encoding="utf-8")
    with contextlib.suppress(ArtifactError):
        require_replaceable(folder, overwrite=True)
        require(False, f"{name!r} would be deleted by --overwrite")
    (folder / name).unlink()


def _manifest(folder):
    try:
        told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def _require_same_base(told, before):
    for field in IDENTITY:
        then, now = before.get(field), told.get(field)
        if field == "base_identity" and now is None:
            continue  # an older freemoe wrote it, which is said aloud
        if field == "base_identity" and isinstance(now, dict):
            if now.get("transformers") != then["transformers"]:
                continue  # another release, which may know other settings
            for one in (then, now):
                # Neither artefact was made with a chat template, so it does not matter which one there is.
                if isinstance(one.get("tokenizer"), dict):
                    one["tokenizer"].pop("chat template", None)
        require(_alike(then, now), f"{field} says another base and was accepted: {str(now)[:200]}")
    require(told.get("kind") == before["kind"], f"it was opened although its kind is {told.get('kind')!r}")


def _alike(a, b):
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_alike(a.get(key), b.get(key)) for key in a.keys() | b.keys())
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    return a == b


# ---------------------------------------------------------------------------------------- experts


def _listed(folder):
    """What reads an artefact without its base: `freemoe inspect`, and `freemoe merge --dry-run` of every expert."""
    # A merge must bear by itself what inspect refuses.
    for name in ("math/0", *_names(folder)):
        with contextlib.suppress(FreeMoEError):
            merge(folder, name, folder.parent / "merged", allow_rejected=True, dry=True)
    inspect_artefact(folder)


def _names(folder):
    rows = (_manifest(folder) or {}).get("experts")
    rows = rows if isinstance(rows, list) else []
    return [row["name"] for row in rows if isinstance(row, dict) and isinstance(row.get("name"), str)]


def _experts(folder, material):
    moe = FreeMoE.from_pretrained(folder, base=material.model, tokenizer=material.tokenizer)
    told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    held = read_plain(folder / "experts.safetensors")
    names = [described["name"] for described in told["experts"]]
    require(moe.experts == names and len(set(names)) == len(names), f"experts {names} became {moe.experts}")
    require(not {"base", "auto"} & set(names), f"an expert is called as the base is: {names}")
    used = set()
    for described in told["experts"]:
        expert = moe._experts[described["name"]]
        require(expert.kind in _KINDS, f"an expert of the unknown kind {expert.kind!r}")
        said = json.loads(json.dumps(expert.manifest_entry()))
        require(all(_alike(said[k], described.get(k)) for k in said), f"{described} was read as {said}")
        _require_tensors(expert.to_tensors(), held)
        used |= set(expert.to_tensors())
        mask = moe.expert_mask(expert.name)
        some = expert.kind != "base"
        require(bool(mask.count) == some, f"{expert.kind} {expert.name!r} has {mask.count} weights off")
        require(mask.decode(mask.encode(), moe._weights).is_equal(mask), f"the mask of {expert.name!r} does not ascend")
        _require_zeros(moe, expert.name, mask, material)
        _require_off(moe, described, held, mask)
    require(used == set(held), f"tensors that no expert has: {sorted(set(held) - used)[:3]}")
    _require_router(moe, told, folder, material)
    require(torch.equal(logits(material.model, material.probes), material.answers), "the base is not the base any more")


def _require_tensors(read, held):
    """What was read is what stands in the file, number by number."""
    for name, tensor in read.items():
        require(name in held, f"the tensor {name!r} comes from nowhere")
        if "|all|" in name:
            continue
        require(bool(tensor.double().isfinite().all()), f"{name!r} holds NaN or infinity")
        same = tensor.shape == held[name].shape and torch.equal(tensor.double(), held[name].double())
        require(same, f"{name!r} was read as other numbers than the file holds")


def _require_zeros(moe, name, mask, material):
    """The expert computes what a copy of the base with zeros computes."""
    zeroed = copy.deepcopy(material.model)
    parameters = dict(zeroed.named_parameters())
    for weight, own in mask.items():
        # Of this base every weight lies in memory as it is counted.
        parameters[weight].data.view(-1)[own.to_bools()] = 0
    with torch.no_grad():
        ours = moe(material.probes, expert=name, use_cache=False).logits
    require(bool(ours.isfinite().all()), f"{name!r} answers NaN")
    require(torch.equal(ours, logits(zeroed, material.probes)), f"{name!r} does not do what its numbers say")


def _require_off(moe, described, held, mask):
    """What is off is what the file's numbers say, read by other code."""
    weights = {w.name: w.parameter.detach() for w in moe._weights}
    wanted = off_of(described, held, weights, {w.name: w.tap for w in moe._weights})
    if wanted is None:
        return
    ours = {name: own.to_bools().view(weights[name].shape) for name, own in mask.items() if len(own)}
    theirs = {name: off for name, off in wanted.items() if bool(off.any())}
    who = described["name"]
    require(ours.keys() == theirs.keys(), f"{who!r} touches {sorted(ours)}, and its tensors say {sorted(theirs)}")
    for name, off in theirs.items():
        require(torch.equal(ours[name].cpu(), off), f"{who!r} has other weights of {name!r} off than it says")


def _require_router(moe, told, folder, material):
    if not told.get("router"):
        require(moe.router is None, "a router from nowhere")
        return
    said = json.loads(json.dumps(moe.router.describe()))
    require(_alike(said, {k: told["router"].get(k) for k in said}), "the router was read as another")
    held = read_plain(folder / "router.safetensors")
    read = moe.router.to_tensors()
    _require_tensors(read, held)
    require(set(read) == set(held), f"tensors that no router has: {sorted(set(held) - set(read))[:3]}")
    levels = [moe.router.domain, *moe.router.subdomain.values()]
    numbers = [moe.router.threshold, *(level.temperature for level in levels)]
    sound = all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) and all(n > 0 for n in numbers[1:])
    require(sound, f"the router's threshold and temperatures are {numbers}")
    require(bool((moe.router.scale > 0).all()), "the router's scale has zeros")
    for name, route in moe.route(material.probes):
        require(math.isfinite(route.confidence), "the router is not sure how sure it is")
        require(name == "base" or name == route.subdomain, f"{route.subdomain!r} was answered by {name!r}")


# ---------------------------------------------------------------------------------------- trimmed


def _trimmed(folder, material):
    model, _, trimmed = load_trimmed(folder, str(material.folder / "mixture"), "auto", "cpu")
    before = logits(model, material.probes)
    told = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    held = read_plain(folder / WEIGHTS)
    require(_alike(list(trimmed.plan.ks), told["top_k"]), f"the plan {told['top_k']} was read as {trimmed.plan.ks}")
    require(trimmed.rescale == told["rescale"], "another rule for router weights")
    layers = list(told["hook_layers"] or {})
    read = trimmed.hook_tensors()
    _require_tensors(read, held)
    require(set(read) == set(held), f"tensors that no hook has: {sorted(set(held) - set(read))[:3]}")
    if trimmed.hooks is not None:
        require(trimmed.hooks.scope == told["scope"], "another scope")
        require(trimmed.hooks.position == told["position"], "another position")
        widths = {str(n): hook.width for n, hook in trimmed.hooks.items()}
        require(_alike(widths, {n: told["hook_layers"][n] for n in layers}), f"hooks of the widths {widths}")
    with trimmed.attached(model):
        ours = logits(model, material.probes)
    require(bool(ours.isfinite().all()), "the trimmed mixture answers NaN")
    require(torch.equal(logits(model, material.probes), before), "the base is not the base any more")
