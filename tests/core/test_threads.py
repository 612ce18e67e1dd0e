"""Turns at what only one thread may use, in the order in which they were asked for."""

import contextlib
import ctypes
import random
import sys
import threading

import pytest

from freemoe.core import threads
from freemoe.core.errors import BusyError
from freemoe.core.threads import ModelLock


def is_free(turn):
    """Whether another thread gets the turn at once."""
    entered = threading.Event()

    def work():
        with turn.hold_lock(given_up=given_up):
            entered.set()

    given_up = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    free = entered.wait(1)
    given_up.set()
    thread.join()
    return free and not turn.is_owned()


def interrupt_at(number_of_event, work):
    """Run some work, with a ctrl-C at one call or line of the module; None where it has fewer."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename != threads.__file__:
            return None
        # Between a function's last line and its end no interrupt is looked for.
        seen += event != "return"
        if seen == number_of_event:
            sys.settrace(None)
            del frame  # the traceback is to keep no more than it would of a ctrl-C
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    return None


def use_nested(turn):
    with turn.hold_lock(), turn.hold_lock():
        assert turn.is_owned()


def use_after_another(turn):
    inside, leave = threading.Event(), threading.Event()

    def work():
        with turn.hold_lock():
            inside.set()
            leave.wait(0.005)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    try:
        with turn.hold_lock():
            pass
    finally:
        leave.set()
        thread.join()


@pytest.mark.parametrize("use", [use_nested, use_after_another])
def test_an_interrupt_at_any_line_leaves_the_turn_free(use):
    for number in range(1, 500):
        turn = ModelLock()
        # The error stays alive with its frames, as the last one does in a notebook.
        error = interrupt_at(number, lambda turn=turn: use(turn))
        assert is_free(turn), number
        if error is None:
            break
    assert 20 < number < 499


@pytest.mark.skipif(not hasattr(ctypes, "pythonapi"), reason="interrupts of this interpreter only")
def test_interrupts_at_random_leave_one_thread_at_a_time_and_the_turn_free():
    turn, over, last, wrong, errors = ModelLock(), threading.Event(), [0], [], []

    def work():
        me = threading.get_ident()
        while not over.is_set():
            try:
                with turn.hold_lock(), turn.hold_lock():
                    last[0] = me
                    for _ in range(20):
                        if last[0] != me:
                            wrong.append(me)
            except KeyboardInterrupt as error:
                errors.append(error)

    def guarded():
        while not over.is_set():
            with contextlib.suppress(KeyboardInterrupt):
                work()

    workers = [threading.Thread(target=guarded) for _ in range(3)]
    for worker in workers:
        worker.start()
    rng = random.Random(0)
    for _ in range(1500):
        victim = ctypes.c_ulong(rng.choice(workers).ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(victim, ctypes.py_object(KeyboardInterrupt))
        over.wait(rng.random() * 2e-4)
    over.set()
    for worker in workers:
        worker.join(20)
    assert not any(worker.is_alive() for worker in workers)
    assert (len(errors) > 100, wrong) == (True, [])
    assert is_free(turn)


def test_first_come_first_served():
    turn, order = ModelLock(), []

    def work(number):
        with turn.hold_lock():
            order.append(number)

    threads = []
    with turn.hold_lock():
        assert turn.is_owned()
        for number in range(6):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(turn._places) < number + 2:
                pass
        with turn.hold_lock():
            assert order == []
    for thread in threads:
        thread.join(20)
    assert order == list(range(6))
    assert not turn.is_owned()


def test_who_gives_up_waits_no_longer():
    turn, given_up, found = ModelLock(), threading.Event(), []

    def work():
        try:
            with turn.hold_lock(given_up=given_up):
                found.append("in")
        except BusyError as error:
            found.append(str(error))

    with turn.hold_lock():
        thread = threading.Thread(target=work)
        thread.start()
        given_up.set()
        thread.join(20)
    assert found == ["The text was closed before the model was free to begin it."]
    with turn.hold_lock("raise"):
        pass
