"""Parts of a run that other processes do: joined in the order of the run, and never written twice."""

import torch

from freemoe.core.run.folder import RunFolder, RunPart
from tests.core.run.test_journal import never
from tests.core.run.work import writes


def test_parts_of_a_run_are_joined_in_the_order_of_the_run(tmp_path):
    run = RunFolder(tmp_path / "out", {})
    run.journal.run_unit("first", lambda: 0)
    for name in ("b", "a"):
        writes(str(tmp_path / "out"), name)
    assert "a/0" not in run.journal
    for name in ("a", "b"):
        run.merge_parts(name)
    names = [f"{unit}/{what}" for unit in "ab" for what in (0, 1, 2, "tensor")]
    assert list(run.journal._values) == ["first", *names]
    assert torch.equal(run.run_tensor_unit("b/tensor", never)["a"], torch.ones(2))
    # Done once, and by this run.
    assert (run.journal.done, run.journal.reused) == (9, 0)
    assert not list((tmp_path / "out.partial" / "parts").iterdir())
    run.publish_folder()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_part_sees_what_is_finished_and_writes_nothing_of_it_again(tmp_path):
    run = RunFolder(tmp_path / "out", {})
    run.journal.run_unit("first", lambda: 7)
    run.run_tensor_unit("t", lambda: {"a": torch.ones(3)})
    with run.journal.path.open("ab") as stream:
        stream.write(b'{"unit": "half')
    before = run.journal.path.read_bytes()
    part = RunPart(tmp_path / "out", "u")
    assert part.journal.run_unit("first", never) == 7
    assert torch.equal(part.run_tensor_unit("t", never)["a"], torch.ones(3))
    part.delete_tensors("t")
    assert run.journal.path.read_bytes() == before
    assert run.has_tensors("t")
    assert not part.journal.path.exists()
