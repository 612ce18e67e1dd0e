"""Errors print a message for people, and callers may catch them by the usual Python names too."""

import pickle

import pytest

from freemoe.core import errors

ALL = [
    (errors.UnknownNameError, KeyError),
    (errors.RecipeError, ValueError),
    (errors.DataError, ValueError),
    (errors.HubError, ValueError),
    (errors.SplitError, ValueError),
    (errors.FamilyError, ValueError),
    (errors.NumericError, ValueError),
    (errors.ArtifactError, OSError),
    (errors.LockedError, OSError),
    (errors.BusyError, RuntimeError),
    (errors.DiskError, OSError),
    (errors.VersionError, ImportError),
    (errors.SandboxError, RuntimeError),
    (errors.WorkerError, RuntimeError),
]


@pytest.mark.parametrize(("kind", "builtin"), ALL, ids=[k.__name__ for k, _ in ALL])
def test_each_is_ours_and_an_ordinary_one(kind, builtin):
    error = kind("The 'cause' and the cure.")
    assert isinstance(error, errors.FreeMoEError)
    assert isinstance(error, builtin)
    # KeyError alone would print quotes around it.
    assert str(error) == "The 'cause' and the cure."
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)


def test_the_table_is_complete():
    children = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.FreeMoEError)}
    assert children == {errors.FreeMoEError, *(kind for kind, _ in ALL)}


def test_an_error_without_a_message():
    assert str(errors.DataError()) == ""
