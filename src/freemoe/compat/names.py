"""Names of other packages that may be missing from the installed release, are exchanged for a while, or log too much."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from freemoe.core.environment import package_versions
from freemoe.core.errors import VersionError

TRIED = {"transformers": ">=5.16,<6", "lm-eval": ">=0.4.13", "peft": ">=0.18"}
"""Package -> releases that freemoe is tried with, as in ``pyproject.toml``."""


@contextmanager
def attribute_replaced(attributes: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """While open, one of an object's own attributes (``vars(thing)``) is another, afterwards what it was before, or none; it nests."""
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        if before:
            attributes.update(before)
        else:
            del attributes[name]


@contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Inside, loggers of other packages report errors alone."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def name_of(package: str, path: str, purpose: str) -> Any:
    """What stands at a path inside another package.

    ``path``: module and name, ``lm_eval.utils:env``, or a module alone; ``purpose`` completes "freemoe needs it to ...".
    """
    module, _, name = path.partition(":")
    try:
        found = import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError) as error:
        raise missing_name_error(package, path.replace(":", "."), purpose) from error


def attribute_of(thing: Any, name: str, package: str, purpose: str) -> Any:
    """A private attribute of another package's object."""
    try:
        return getattr(thing, name)
    except AttributeError as error:
        raise missing_name_error(package, f"{type(thing).__name__}.{name}", purpose) from error


def missing_name_error(package: str, name: str, purpose: str) -> VersionError:
    """The error that says that a release lacks a name."""
    installed = package_versions([package]).get(package)
    found = f"{package} {installed} has no {name}" if installed else f"{package}, which has {name}, is not installed"
    wanted = f"{package}{TRIED[package]}"
    return VersionError(f"{found}; freemoe needs it to {purpose}, and is tried with {wanted}. pip install '{wanted}'")
