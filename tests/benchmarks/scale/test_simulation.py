"""The simulation of a cluster: by hand where a hand can, and its laws."""

import pytest

from benchmarks.scale.simulation import PAPER, Link, Measured, Part, simulate, stages, stops_at, table

FREE = Measured({"begin": 1.0, "purify": 4.0, "search": 2.0, "report": 3.0}, 0.0, 0.0)
EACH = int(PAPER["devices_per_worker"].value)
BASE = PAPER["parameters"].value * PAPER["weight_bytes"].value
LOAD = BASE / PAPER["storage_of_one"].value


def only(*parts):
    return {"purify": list(parts)}


def test_one_worker_does_one_after_the_other():
    parts = only(Part(10, 0, 0, 0), Part(20, 0, 0, 0))
    assert simulate(parts, FREE, EACH).total == pytest.approx(LOAD + 30)
    assert simulate(parts, FREE, 2 * EACH).total == pytest.approx(LOAD + 20)
    # A third worker has nothing to do and loads no base.
    assert simulate(parts, FREE, 3 * EACH).bytes["bases"] == pytest.approx(2 * BASE)
    # Starts and handing out cost what was measured.
    slow = simulate(only(*[Part(1, 0, 0, 0)] * 3), Measured(FREE.passes, 2.0, 7.0), EACH)
    assert slow.total == pytest.approx(7 + LOAD + 3 * (2 + 1))


def test_links_are_passed_one_after_the_other_and_nobody_waits_for_who_comes_later():
    link = PAPER["link"].value
    # What all read is fetched once by each worker; the second one waits for the first one's bytes.
    common = simulate(only(*[Part(0, 5 * link, 0, 0)] * 4), FREE, 2 * EACH)
    assert common.total == pytest.approx(LOAD + 10)
    assert common.bytes["sent"] == pytest.approx(10 * link)
    # The short unit's answer does not wait for that of the long one, which was begun before.
    up, disk = 100.0 * link, PAPER["disk"].value
    run = simulate(only(Part(1000, 0, 0, 0), Part(1, 0, 0, up)), FREE, 2 * EACH)
    assert run.total == pytest.approx(LOAD + 1000 + up / disk)


@pytest.mark.parametrize("subdomains", [1, 8])
def test_more_devices_are_never_slower_and_never_more_than_so_many_times_as_fast(subdomains):
    rows = table(FREE, subdomains, (8, 64, 512))
    hours = [row["hours"] for row in rows]
    assert hours == sorted(hours, reverse=True)
    assert all(0 < row["efficiency"] <= 1 + 1e-9 and 0 < row["busy"] <= 1 for row in rows)
    units = len(stages(FREE, subdomains)["purify"])
    assert units == 64 * subdomains
    # No more bases are loaded than there are units.
    assert rows[-1]["bytes"]["bases"] == pytest.approx(BASE * min(units, 512 // EACH))


def test_the_work_is_that_of_the_passes():
    parts = stages(FREE, 8)
    document = parts["begin"][0].seconds / (64 * PAPER["reference_documents"].value)
    power = PAPER["device_flops"].value * PAPER["utilisation"].value * EACH
    assert document == pytest.approx(2 * PAPER["parameters"].value * PAPER["tokens"].value / power)
    for stage, passes in (("purify", 4), ("search", 2), ("report", 3)):
        assert sum(p.seconds for p in parts[stage]) == pytest.approx(passes * 64_000 * document)


def test_where_it_stops():
    rows = [{"devices": d, "hours": h} for d, h in ((8, 10.0), (16, 5.0), (64, 2.0), (128, 1.9))]
    assert stops_at(rows) == 64
    assert stops_at(rows[:3]) == 64
    assert Link(2.0).pass_on(1.0, 4.0) == 3.0
    assert PAPER["domains"].value == 64
