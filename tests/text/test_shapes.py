"""Rows of other people's data: recognised by their columns, refused with the line and the way out."""

import pytest

from freemoe.core.errors import DataError
from freemoe.text.rows import DataRow
from freemoe.text.shapes import SHAPES, ChoiceItem, detect_shape, read_item, shape_by_name


def row(value, number=1):
    return DataRow(number, f"a.jsonl:{number}", value)


def read(value, shape=None):
    found = shape_by_name(shape) if shape else detect_shape(row(value))
    return read_item(row(value), found, row(value))


def says(role, content):
    return {"role": role, "content": content}


TALK = [says("system", "s"), says("user", "u1"), says("assistant", "a1"), says("user", "u2"), says("assistant", "a2")]


def test_every_turn_of_a_conversation_is_answered_after_all_before_it():
    item = read({"messages": TALK})
    assert [t.response for t in item.turns] == ["a1", "a2"]
    assert list(item.turns[1].messages) == TALK[:4]
    assert item.turns[0].prompt == "System: s\n\nUser: u1\n\nAssistant:"


def test_other_people_s_conversations_are_the_same():
    shared = [{"from": "system", "value": "s"}, {"from": "human", "value": "u1"}, {"from": "gpt", "value": "a1"}]
    parts = [says("system", "s"), says("user", [{"type": "text", "text": "u1"}]), says("assistant", "a1")]
    assert read({"conversations": shared}) == read({"messages": parts}) == read({"messages": TALK[:3]})
    # Prompt and completion as messages, as trainers of preferences have them.
    assert read({"prompt": TALK[:2], "completion": [TALK[2]]}) == read({"messages": TALK[:3]})


def test_an_answer_before_any_question_is_no_turn():
    item = read({"messages": [says("assistant", "hello"), says("user", "u"), says("assistant", "a")]})
    assert [t.response for t in item.turns] == ["a"]


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        ({"question": "q", "choices": ["x", "y"], "answer": 1}, 1),
        ({"question": "q", "options": ["x", "y"], "label": "B"}, 1),
        ({"question": "q", "choices": '["x", "y"]', "answer": "1"}, 1),
        ({"question": "q", "choices": "['x', 'y']", "answer": "y"}, 1),
        ({"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, 1),
        ({"question": "q", "A": "x", "B": "y", "C": "", "answer": "B"}, 1),
    ],
)
def test_choices_as_data_sets_write_them(value, gold):
    assert read(value) == ChoiceItem("q", ("x", "y"), gold)


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ({"prompt": "p", "prompt_id": "1", "messages": TALK}, "chat"),
        ({"instruction": "i", "input": "", "output": "o", "text": "all"}, "instruction"),
        ({"prompt": "p", "response": "r"}, "completion"),
        ({"text": "t", "meta": {}}, "text"),
        ("only text", "text"),
    ],
)
def test_what_is_more_than_the_rest_decides(value, shape):
    assert detect_shape(row(value)).name == shape


REFUSED = {
    "role": ({"messages": [says("robot", "x")]}, "messages 1: the role 'robot' is unknown; allowed: system"),
    "no answer": ({"messages": [says("user", "x")]}, r"nobody answers a user here \(roles: user\)"),
    "picture": ({"messages": [says("user", [{"type": "image"}])]}, "more than text"),
    "tool call": ({"messages": [says("user", "x"), says("assistant", None)]}, "messages 2: its content is None"),
    "no message": ({"messages": ["hi"]}, "messages 1 is 'hi'; a message is an object"),
    "no list": ({"messages": "hi"}, "'messages' is 'hi'"),
    "two meanings": ({"instruction": "i", "output": "o", "prompt": "p", "target": "t"}, "both formats.*target:FILE or"),
    "question alone": (
        {"question": "q", "answer": "a"},
        "missing 'choices'.*If it is meant as 'completion', write completion:F",
    ),
    "nothing": ({"body": "x"}, "no known key; keys seen: 'body'"),
    "number": (3, r"a JSON int \(3\)"),
    "blank": ({"instruction": " ", "output": "o"}, "'instruction' is ' '"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_line_and_way_out(name):
    value, message = REFUSED[name]
    with pytest.raises(DataError, match=r"a.jsonl:1.*" + message):
        read(value)


def test_a_forced_shape_takes_looser_columns():
    item = read({"question": "q", "answer": "a"}, "completion")
    assert (item.turns[0].prompt, item.turns[0].gap, item.turns[0].response) == ("q", "", "a")


def test_a_row_of_another_shape_names_the_first():
    first = row({"prompt": "p", "target": "t"})
    with pytest.raises(DataError, match=r"a 'chat' line in a file of 'target' lines .see a.jsonl:1"):
        read_item(row({"messages": TALK}, 7), SHAPES["target"], first)
    with pytest.raises(DataError, match=r"a.jsonl:7: missing 'target'; keys seen: 'prompt'"):
        read_item(row({"prompt": "p"}, 7), SHAPES["target"], first)
