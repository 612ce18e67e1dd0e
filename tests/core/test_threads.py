"""Turns at what only one thread may use, in the order in which they were asked for."""

import threading

import pytest

from freemoe.core.errors import BusyError
from freemoe.core.threads import Turn, turn_of


class Thing:
    """Stands for a model."""


def test_everybody_asks_the_same_turn():
    thing = Thing()
    assert turn_of(thing) is turn_of(thing)
    assert turn_of(thing) is not turn_of(Thing())


def test_first_come_first_served():
    turn, order = Turn(), []

    def work(number):
        with turn.held():
            order.append(number)

    threads = []
    with turn.held():
        assert turn.mine()
        for number in range(6):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(turn._waiting) <= number:
                pass
        with turn.held():
            assert order == []
    for thread in threads:
        thread.join(20)
    assert order == list(range(6))
    assert not turn.mine()


def test_who_gives_up_waits_no_longer():
    turn, given_up, found = Turn(), threading.Event(), []

    def work():
        try:
            with turn.held(given_up=given_up):
                found.append("in")
        except BusyError as error:
            found.append(str(error))

    with turn.held():
        thread = threading.Thread(target=work)
        thread.start()
        given_up.set()
        thread.join(20)
    assert found == ["The text was closed before the model was free to begin it."]
    with turn.held("raise"):
        pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_ends_a_turn(error):
    turn = Turn()
    with pytest.raises(error), turn.held():
        raise error
    assert (turn._users, turn._waiting) == ([], [])
