"""--overwrite replaces what freemoe wrote, and nothing else; experts that there are not are refused, in dry runs too."""

import pytest

from tests.cli.test_refusals import check_refusal

LAW = ["-d", "law=law.jsonl"]
EVAL = ["eval", "freemoe-demo", *LAW, "--overwrite", "-o"]


@pytest.mark.parametrize("content", ["my notes", "{}", "[]", '{"kind": "evaluation"}', "[" * 100_000, ""])
def test_a_file_that_is_no_result_stays(folder, freemoe, content):
    (folder / "mine.json").write_text(content)
    check_refusal(freemoe(*EVAL, "mine.json"), ["'mine.json' is no result of freemoe eval", "nothing else is replaced"])
    assert (folder / "mine.json").read_text() == content


def test_a_page_that_is_not_ours_stays(folder, freemoe):
    (folder / "mine.html").write_text("<title>my page</title>")
    check_refusal(freemoe(*EVAL, "mine.json"), ["'mine.html', where the page goes, is no page of freemoe"])
    assert not (folder / "mine.json").exists()


def test_a_folder_is_no_place_for_a_result(folder, freemoe):
    (folder / "there").mkdir()
    (folder / "there" / "mine").write_text("x")
    check_refusal(freemoe(*EVAL, "there"), ["'there' is no result of freemoe eval"])
    check_refusal(freemoe(*EVAL, "nowhere/scores.json"), ["There is no folder 'nowhere'"])
    assert (folder / "there" / "mine").read_text() == "x"


@pytest.mark.parametrize("content", ["{}", "[1]", "words", '{"format": 3}'])
def test_a_folder_with_a_file_of_that_name_is_no_artefact(folder, freemoe, content):
    (folder / "there").mkdir()
    (folder / "there" / "freemoe_config.json").write_text(content)
    (folder / "there" / "mine").write_text("x")
    done = freemoe("build", "freemoe-demo", *LAW, "-o", "there", "--overwrite")
    check_refusal(done, ["'there' is not an artefact", "is not replaced"])
    assert (folder / "there" / "mine").read_text() == "x"


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("name", "words"),
    [("foo", "Known: base"), ("base+foo", "Known: base"), ("law/0", "Known: base"), ("auto", "has no router")],
)
def test_an_expert_of_a_plain_model(folder, freemoe, name, words, dry):
    check_refusal(freemoe("eval", "freemoe-demo", *LAW, "-e", name, *dry), [f"Unknown expert '{name}'", words])
