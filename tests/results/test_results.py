"""Types of results: what they refuse, their schemas, and reading. That runs write what is typed, every run in the tests checks."""

import json

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from freemoe.cli import app
from freemoe.cli.schemas import DOCUMENTS
from freemoe.core.artifacts import write_manifest
from freemoe.core.errors import ArtifactError
from freemoe.core.run.execute import RESULT_FORMAT
from freemoe.domain_experts.result import BuildResult
from freemoe.hookmoe.result import TrimResult
from freemoe.results import RunResult, read_result, wrap_display_errors
from freemoe.systems import SYSTEMS
from tests.report.synthetic import make_result


def test_every_system_has_a_typed_result():
    for kind in SYSTEMS.names():
        result = SYSTEMS.get(kind).result_type
        assert issubclass(result, RunResult)
        assert result.model_json_schema()["properties"]["kind"]["const"] == kind
        assert result.model_json_schema()["properties"]["format"]["const"] == RESULT_FORMAT


def test_a_result_is_what_its_type_says_and_nothing_else():
    whole = json.loads(json.dumps(make_result()))
    assert BuildResult.model_validate(whole).domains[0].rows["base"].documents > 0
    with pytest.raises(ValidationError, match="unheard_of"):
        BuildResult.model_validate({**whole, "unheard_of": 1})
    domain = {**whole["domains"][0], "unit": "furlongs"}
    with pytest.raises(ValidationError, match=r"domains\.0\.unit"):
        BuildResult.model_validate({**whole, "domains": [domain]})
    lacking = {k: v for k, v in whole.items() if k != "router"}
    with pytest.raises(ValidationError, match="router"):
        BuildResult.model_validate(lacking)
    with pytest.raises(ValidationError, match="kind"):
        TrimResult.model_validate(whole)


def test_schemas_are_printed():
    def schema(*kind):
        return CliRunner().invoke(app, ["schema", *kind])

    assert json.loads(schema("converted").output)["title"] == "ConvertResult"
    assert list(json.loads(schema().output)) == [*SYSTEMS.names(), *DOCUMENTS]
    assert "Did you mean 'converted'" in str(schema("convertd").exception)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "is not a file; the folder of a finished run is needed"),
        ("{", "is damaged"),
        ("[]", "a result is a mapping, got list"),
        ('{"format": 99, "freemoe": "7.0"}', r"format 99, and this freemoe reads up to 1\. .*7\.0"),
        ('{"kind": "soup"}', "of kind 'soup'"),
        ('{"kind": "domain-experts", "format": 1}', "is not whole: .*recipe: Field required"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, written, message):
    if written is not None:
        (tmp_path / "result.json").write_text(written)
    with pytest.raises(ArtifactError, match=message):
        read_result(tmp_path)


def test_a_folder_and_its_file_are_read_and_an_unfinished_run_is_named(tmp_path):
    known = json.loads(json.dumps(make_result()))
    (tmp_path / "result.json").write_text(json.dumps(known))
    assert read_result(tmp_path) == read_result(tmp_path / "result.json") == BuildResult.model_validate(known)
    assert read_result(tmp_path, BuildResult) == read_result(tmp_path)
    with pytest.raises(ArtifactError, match="is of kind 'domain-experts', and 'trimmed-moe' is needed"):
        read_result(tmp_path, TrimResult)
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(ArtifactError, match=r"unfinished run stands at .*other\.partial"):
        read_result(tmp_path / "other")


def test_a_result_that_is_not_what_its_type_says_is_refused(tmp_path):
    whole = json.loads(json.dumps(make_result()))

    def read(**changed):
        (tmp_path / "result.json").write_text(json.dumps({**whole, **changed}))
        return read_result(tmp_path)

    def first(**changed):
        return [{**whole["domains"][0], **changed}, *whole["domains"][1:]]

    # A newer freemoe may write more.
    assert read(more=[1], domains=first(deeper=1)) == read() == BuildResult.model_validate(whole)
    for changed, told in (
        ({"recipe": "none"}, r"recipe: .*object"),
        ({"format": None}, "format: "),
        ({"domains": first(reported_documents="12")}, r"domains\.0\.reported_documents: .*integer"),
    ):
        with pytest.raises(ArtifactError, match=rf"is not whole: {told}.*cut short or edited"):
            read(**changed)
    lost = pytest.raises(ArtifactError, match=r"'x' cannot be shown \(KeyError: 'rule'\).*cut short or edited")
    with lost, wrap_display_errors("x"):
        whole["rule"]
    with pytest.raises(ArtifactError, match="as it was"), wrap_display_errors("x"):
        raise ArtifactError("as it was")


def test_a_result_of_another_kind_than_its_artefact_is_refused(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(make_result()))
    write_manifest(tmp_path, {"kind": "trimmed-moe"})
    with pytest.raises(ArtifactError, match="is of kind 'domain-experts', and its artefact is 'trimmed-moe'"):
        read_result(tmp_path)
