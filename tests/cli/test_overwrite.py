"""--overwrite replaces what freemoe wrote, and nothing else; experts that there are not are refused, in dry runs too."""

import pytest

LAW = ["-d", "law=law.jsonl"]
EVAL = ["eval", "freemoe-demo", *LAW, "--overwrite", "-o"]


@pytest.mark.parametrize("content", ["my notes", "{}", "[]", '{"kind": "evaluation"}', "[" * 100_000, ""])
def test_a_file_that_is_no_result_stays(folder, freemoe, content):
    (folder / "mine.json").write_text(content)
    freemoe(*EVAL, "mine.json").refused("'mine.json' is no result of freemoe eval", "nothing else is replaced")
    assert (folder / "mine.json").read_text() == content


def test_a_page_that_is_not_ours_stays(folder, freemoe):
    (folder / "mine.html").write_text("<title>my page</title>")
    freemoe(*EVAL, "mine.json").refused("'mine.html', where the page goes, is no page of freemoe")
    assert not (folder / "mine.json").exists()


def test_a_folder_is_no_place_for_a_result(folder, freemoe):
    (folder / "there").mkdir()
    (folder / "there" / "mine").write_text("x")
    freemoe(*EVAL, "there").refused("'there' is no result of freemoe eval")
    freemoe(*EVAL, "nowhere/scores.json").refused("There is no folder 'nowhere'")
    assert (folder / "there" / "mine").read_text() == "x"


@pytest.mark.parametrize("content", ["{}", "[1]", "words", '{"format": 3}'])
def test_a_folder_with_a_file_of_that_name_is_no_artefact(folder, freemoe, content):
    (folder / "there").mkdir()
    (folder / "there" / "freemoe_config.json").write_text(content)
    (folder / "there" / "mine").write_text("x")
    done = freemoe("build", "freemoe-demo", *LAW, "-o", "there", "--overwrite")
    done.refused("'there' is not an artefact", "is not replaced")
    assert (folder / "there" / "mine").read_text() == "x"


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("name", "words"),
    [("foo", "Known: base"), ("base+foo", "Known: base"), ("law/0", "Known: base"), ("auto", "has no router")],
)
def test_an_expert_of_a_plain_model(folder, freemoe, name, words, dry):
    freemoe("eval", "freemoe-demo", *LAW, "-e", name, *dry).refused(f"Unknown expert '{name}'", words)
