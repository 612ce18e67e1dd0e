"""Where units of work are done, as recipes spell it."""

import pytest

from freemoe.core.errors import RecipeError
from freemoe.core.run.places import ExecutorSpec, parse_executor_spec


@pytest.mark.parametrize(
    ("text", "workers", "place"),
    [
        ("local", 1, ExecutorSpec()),
        ("local", 3, ExecutorSpec(workers=3)),
        ("local:4", 1, ExecutorSpec(workers=4)),
        ("local:4", 4, ExecutorSpec(workers=4)),
        ("ray", 1, ExecutorSpec(ray=True, workers=None)),
        ("ray", 2, ExecutorSpec(ray=True, workers=2)),
        ("ray://head.lan:10001", 8, ExecutorSpec(ray=True, workers=8, address="ray://head.lan:10001")),
        ("ray://[::1]:10001", 1, ExecutorSpec(ray=True, workers=None, address="ray://[::1]:10001")),
    ],
)
def test_every_spelling(text, workers, place):
    assert parse_executor_spec(text, workers) == place
    assert place.is_parallel is (place != ExecutorSpec())


@pytest.mark.parametrize(
    "text",
    [
        "", "Ray", "local:", "local:0", "local:-1", "local:4097", "local:99999999999", "local:2x", "local:٣", "ray:2", "ray:/h:1",
        "ray://host", "ray://host:0", "ray://host:65536", "ray://host:1/x", "ray://user@host:1", "ray://a b:1", "auto", "10.0.0.1:6379",
    ],
)  # fmt: skip
def test_what_is_none_of_them_is_refused_with_those_that_are(text):
    with pytest.raises(RecipeError) as caught:
        parse_executor_spec(text)
    assert repr(text) in str(caught.value)
    assert "Allowed: local, local:N (N processes), ray (a Ray of this machine alone), ray://HOST:PORT" in str(
        caught.value
    )


def test_two_numbers_of_workers_are_refused():
    with pytest.raises(RecipeError, match=r"--on local:4 and --workers 3"):
        parse_executor_spec("local:4", 3)
