"""Nothing in an artefact that is not what it says acts as the base under another name."""

import json
import shutil

import pytest
import torch

from freemoe.artefacts import load, merge
from freemoe.core.artifacts import MANIFEST, _own_checksum, read_manifest
from freemoe.core.errors import ArtifactError, NumericError
from freemoe.domain_experts.artefact import inspect_artefact
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.evals.held_out import read_record
from freemoe.serve.catalogue import ExpertCatalogue
from tests.artefacts import rename, rewritten
from tests.domain_experts.structured.artefacts import unit_artefact
from tests.tiny import tiny_model, tiny_tokenizer

NAN = float("nan")


def one(manifest, kind="band"):
    """The first expert of a kind."""
    return next(e for e in manifest["experts"] if e["kind"] == kind)


def parts(tensors, part):
    return [key for key in tensors if key.rsplit("|", 2)[1] == part]


def without(part):
    return lambda tensors: [tensors.pop(key) for key in parts(tensors, part)]


def renamed(part, old, new):
    return lambda tensors: [rename(tensors, key, key.replace(old, new)) for key in parts(tensors, part)]


def put(part, value):
    return lambda tensors: tensors.update({k: value(tensors[k]) for k in parts(tensors, part)})


def filled(name, value):
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


def resealed(source, target, edit):
    """A copy whose manifest was edited, its list of files too, and vouches for itself."""
    path = rewritten(source, target) / MANIFEST
    said = json.loads(path.read_text())
    edit(said)
    path.write_text(json.dumps({**said, "checksum": _own_checksum(said)}))
    return target


def used(model, folder, host=None):
    """Load an artefact, or its experts onto a base that others have, and make what each switches off."""
    moe = FreeMoE.from_pretrained(model, folder) if host is None else host
    for name in moe.experts if host is None else host.load_expert(folder):
        moe.expert_mask(name)


@pytest.fixture(scope="module")
def units(tmp_path_factory):
    return unit_artefact(tmp_path_factory.mktemp("units"))


def test_the_artefacts_hold_every_kind(artefact, units):
    described = [e for folder in (artefact, units) for e in read_manifest(folder)["experts"]]
    assert {e["kind"] for e in described} == {"band", "switch", "unit", "base"}


ENTRIES = {
    "an unknown kind": (
        lambda m: one(m).update(kind="bend"),
        r"experts\.0\.kind: Input should be 'base', 'band', .*seen: 'bend'",
    ),
    "a kind that it has no tensors of": (lambda m: one(m).update(kind="switch"), "a band has a rule"),
    "a band that is called base": (lambda m: one(m).update(kind="base"), "a band has a rule"),
    "a band without a rule": (lambda m: one(m).update(band=None), "a band has a rule"),
    "a band upside down": (lambda m: one(m)["band"].update(start=0.9, end=0.1), "ends above its start"),
    "a band of nothing": (lambda m: one(m)["band"].update(end=one(m)["band"]["start"]), "ends above its"),
    "a band beyond the ranking": (lambda m: one(m)["band"].update(start=2.0, end=3.0), "equal to 1 .seen: 2"),
    "a band of NaN": (lambda m: one(m)["band"].update(end=NAN), "a finite number .seen: nan"),
    "an unknown metric": (lambda m: one(m)["band"].update(metric="taste"), "ranks by 'taste', which is none of wanda"),
    "an unknown scope": (lambda m: one(m)["band"].update(scope="world"), "should be 'row' or 'layer'"),
    "an unknown entry": (lambda m: one(m)["band"].update(extra=1), "Extra inputs are not permitted"),
    "no kind": (lambda m: one(m).pop("kind"), "kind: Field required"),
    "no name": (lambda m: one(m).pop("name"), "name: Field required"),
    "another's name": (lambda m: m["experts"][0].update(name=m["experts"][1]["name"]), "a name of its own"),
    "the base's name": (lambda m: one(m).update(name="base"), "a name of its own"),
    "no experts": (lambda m: m.update(experts=[]), "a name of its own"),
    "no list of experts": (lambda m: m.pop("experts"), "a name of its own"),
    "an expert that is a word": (lambda m: m.update(experts=["law/0"]), "experts.0: Input should be an object"),
    "tensors of nobody": (lambda m: m["experts"].pop(), "no expert of its manifest"),
}
TENSORS = {
    "no tensors of one": (without("low"), "holds|fit|cannot be read"),
    "a part that there is not": (renamed("low", "|low|", "|lo|"), r"tensors of lo \("),
    "NaN among the norms": (put("norm", lambda t: t * NAN), "NaN or infinity in '.*norm"),
    "infinite norms": (put("norm", lambda t: t + float("inf")), "NaN or infinity in '.*norm"),
    "negative norms": (put("norm", lambda t: -t - 1), "ends or norms .* do not fit"),
    "norms of another width": (put("norm", lambda t: t[..., :-1].contiguous()), "ends or norms .* do not fit"),
    "no norms": (without("norm"), "norms that are not there"),
    "norms of another input": (renamed("norm", "|norm|", "|norm|x"), "ends or norms .* do not fit"),
    "ends beyond the columns": (put("low", lambda t: t.int() + 1000), "ends or norms .* do not fit"),
    "ends before the columns": (put("low", lambda t: t.int() - 1000), "ends or norms .* do not fit"),
    "ends of fewer rows": (put("low", lambda t: t[:, :1].contiguous()), "ends or norms .* do not fit"),
    "ends in floats": (put("low", lambda t: t.float()), r"tensors of low \(torch\.float32\)"),
    "ends of a weight that there is not": (renamed("low", "q_proj", "z_proj"), "which the model does not have"),
}
UNITS = {
    "an unknown unit": (lambda m: one(m, "unit").update(unit="wish"), "has units of the kind 'wish'"),
    "no unit": (lambda m: one(m, "unit").pop("unit"), "a unit expert a kind of unit"),
    "a unit of another kind": (lambda m: one(m, "switch").update(unit="neuron"), "a unit expert a kind of unit"),
}
CODES = {
    "a code cut short": (put("switch", lambda t: t[:-1].contiguous()), "cut short or edited"),
    "no code": (put("switch", lambda t: t[:0].contiguous()), "holds nothing that is off|cut short"),
    "a code of nothing": (put("switch", lambda t: torch.zeros(9, dtype=torch.uint8)), "holds nothing that is off"),
    "a code in floats": (put("switch", lambda t: t.float()), r"tensors of switch \(torch\.float32\)"),
    "lines that are gone": (lambda t: [without(p)(t) for p in ("rows", "columns", "switch")], "nothing that"),
}
WRONG = {
    ("artefact", "manifest"): ENTRIES,
    ("artefact", "experts"): TENSORS,
    ("units", "manifest"): UNITS,
    ("units", "experts"): CODES,
}


@pytest.mark.parametrize(
    ("source", "file", "edit", "message"),
    [pytest.param(*where, *told, id=name) for where, cases in WRONG.items() for name, told in cases.items()],
)
def test_an_expert_that_is_not_what_it_says(request, tmp_path, world, source, file, edit, message):
    copy = rewritten(request.getfixturevalue(source), tmp_path / "copy", **{file: edit})
    with pytest.raises(ArtifactError, match=message):
        used(world.model, copy)
    with pytest.raises(ArtifactError):
        used(world.model, copy, host=FreeMoE(world.model, []))


ROUTER = {
    "a threshold of NaN": (lambda r: r.update(threshold=NAN), r"router\.threshold: Input should be a finite number"),
    "a threshold that is a word": (lambda r: r.update(threshold="high"), "valid number .seen: 'high'"),
    "a threshold above every confidence": (lambda r: r.update(threshold=1e30), "equal to 1.02 .seen: 1e"),
    "a temperature of NaN": (lambda r: r.update(temperature=NAN), "a finite number"),
    "a temperature of zero": (lambda r: r["subdomain_temperatures"].update(law=0.0), r"subdomain_temperatures\.law"),
    "a negative temperature": (lambda r: r.update(temperature=-1.0), r"router\.temperature"),
    "another number of domains": (lambda r: r["domains"].pop(), "every domain has"),
    "a domain twice": (lambda r: r.update(domains=["law", "law"]), "every domain has"),
    "a domain of no subdomain": (lambda r: r["subdomains"].update(law=[]), r"subdomains\.law: "),
    "a subdomain more": (lambda r: r["subdomains"]["law"].append("law/9"), "3 classes"),
    "a subdomain that is no expert": (lambda r: r["subdomains"].update(law=["law/0", "x/1"]), "leads to 'x/1'"),
    "another feature": (lambda r: r.update(feature="taste"), "seen: 'taste'"),
    "no threshold": (lambda r: r.pop("threshold"), "threshold: Field required"),
    "nothing at all": (lambda r: r.clear(), "domains: Field required"),
}
ROUTER_TENSORS = {
    "NaN in its weights": (filled("domain|weight", NAN), r"NaN or infinity in 'domain\|weight'"),
    "NaN in its bias": (filled("domain|bias", NAN), "NaN or infinity"),
    "NaN in the mean": (filled("mean", NAN), "NaN or infinity in 'mean'"),
    "NaN in level 2": (filled("subdomain|law|weight", NAN), "NaN or infinity in 'subdomain"),
    "a scale of zero": (filled("scale", 0.0), "mean and scale"),
    "a negative scale": (filled("scale", -1.0), "mean and scale"),
    "no tensors": (lambda t: [t.pop(k) for k in list(t) if "law" in k], "KeyError"),
    "weights of another width": (lambda t: t.update({"domain|weight": t["domain|weight"][:, :9].clone()}), "the shape"),
    "all of another width": (
        lambda t: t.update({k: v[..., :9].clone() for k, v in t.items() if not k.endswith("bias")}),
        "features of 9 numbers, and the base's have 32",
    ),
}


@pytest.mark.parametrize("case", [*ROUTER, *ROUTER_TENSORS])
def test_a_router_that_cannot_decide(artefact, tmp_path, world, case):
    edit, message = {**ROUTER, **ROUTER_TENSORS}[case]
    files = {"manifest": lambda m: edit(m["router"])} if case in ROUTER else {"router": edit}
    copy = rewritten(artefact, tmp_path / "copy", **files)
    with pytest.raises(ArtifactError, match=message):
        FreeMoE.from_pretrained(world.model, copy)
    if "the base's have 32" not in message:
        with pytest.raises(ArtifactError, match=message):
            inspect_artefact(copy)


@pytest.mark.parametrize(
    ("stem", "edit", "message"),
    [
        ("result", lambda r: r.pop("domains"), "The result of .* is not whole: domains"),
        ("result", lambda r: r["domains"][0].update(metric=7), r"domains\.0\.metric"),
        ("seen", lambda t: t.pop("about"), "hashes of seen documents cannot be read"),
    ],
)
def test_nothing_is_called_whole_that_cannot_be_read(artefact, tmp_path, stem, edit, message):
    assert inspect_artefact(artefact)["whole_files"] > 5
    with pytest.raises(ArtifactError, match=message):
        inspect_artefact(rewritten(artefact, tmp_path / "copy", **{stem: edit}))


def test_files_that_the_manifest_does_not_vouch_for(artefact, tmp_path, world):
    for name in ("experts.safetensors", "router.safetensors"):
        copy = resealed(artefact, tmp_path / "copy", lambda m, name=name: m["files"].pop(name))
        with pytest.raises(ArtifactError, match=f"does not list '{name}'"):
            FreeMoE.from_pretrained(world.model, copy)


@pytest.mark.parametrize("key", ["kind", "base_fingerprint", "base_model_name_or_path", "experts"])
@pytest.mark.parametrize("edit", [dict.pop, *(lambda m, k, v=v: m.update({k: v}) for v in (None, 3, ["x"]))])
def test_a_manifest_with_a_gap(artefact, tmp_path, key, edit):
    copy = rewritten(artefact, tmp_path / "copy", manifest=lambda m: edit(m, key))
    with pytest.raises(ArtifactError):
        load(copy, device="cpu")


HOSTILE = {
    "router": ([], False, {}, [None], 10**30, "x", {"domains": None}),
    "router.domains": (None, True, NAN, 3, [None], [["law"]], {"law": 1}, 10**30),
    "router.threshold": (None, True, 10**30, -(10**400), "0.5", [0.5]),
    "experts": (7, None, {}, [7], [None], [[]], [{"name": {}, "kind": "base"}]),
    "files": ({"experts.safetensors": 7},),
    "seen": ({"file": "../../secret"}, "x"),
    "revision": (10**30,),
}


@pytest.mark.parametrize(
    ("place", "value"), [(p, v) for p, values in HOSTILE.items() for v in values], ids=lambda given: f"{given!s:.20}"
)
def test_nobody_reads_a_manifest_that_is_none(artefact, tmp_path, world, place, value):
    section, _, key = place.rpartition(".")
    copy = resealed(artefact, tmp_path / "copy", lambda m: (m[section] if section else m).update({key: value}))
    for read in (
        lambda: inspect_artefact(copy),
        lambda: merge(copy, ["law/0", "law/1"], tmp_path / "merged", op="union", dry=True),
        lambda: FreeMoE.from_pretrained(world.model, copy),
        lambda: ExpertCatalogue().with_artefact(copy),
        lambda: read_record(copy),
    ):
        with pytest.raises(ArtifactError, match="is not whole"):
            read()


@pytest.mark.parametrize(
    "identity", [{}, [], {"config": {}}, {"config": [], "buffers": "", "tokenizer": 3, "transformers": 1}]
)
def test_an_identity_that_is_none(artefact, tmp_path, world, identity):
    copy = rewritten(artefact, tmp_path / "copy", manifest=lambda m: m.update(base_identity=identity))
    with pytest.raises(ArtifactError):
        FreeMoE.from_pretrained(world.model, copy, tokenizer=world.tokenizer)


def test_a_tokenizer_that_was_exchanged_after_the_build(artefact, world, tmp_path):
    """What counts as another one, tests/models/checkpoints/test_identity.py shows."""
    base = shutil.copytree(world.base, tmp_path / "base")
    other = tiny_tokenizer()
    other.eos_token = "<s>"
    other.save_pretrained(base)
    for opened, tokenizer in ((str(base), None), (world.model, other)):
        with pytest.raises(ArtifactError, match="another tokenizer"):
            FreeMoE.from_pretrained(opened, artefact, tokenizer=tokenizer, device="cpu")


def test_features_of_nan_are_an_error_and_no_route(artefact):
    model = tiny_model("llama")
    moe = FreeMoE.from_pretrained(model, artefact, tokenizer=tiny_tokenizer())
    with torch.no_grad():
        model.model.embed_tokens.weight[67:70] = NAN
    for call in (moe.route, moe.generate_text):
        with pytest.raises(NumericError, match="features that the router reads have NaN"):
            call("abc")
    assert moe.active == "base"
