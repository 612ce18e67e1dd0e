"""Every error that freemoe raises on purpose: what was wrong, the value seen, the values allowed, what to do."""

from __future__ import annotations


class FreeMoEError(Exception):
    """The parent of all of them; the command line prints its message without a traceback."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument; a message for people is printed as it is.
        return str(self.args[0]) if self.args else ""


class UnknownNameError(FreeMoEError, KeyError):
    """A name that no registry entry, task, expert or family answers to."""


class RecipeError(FreeMoEError, ValueError):
    """A recipe or a flag with a value that cannot work."""


class DataError(FreeMoEError, ValueError):
    """Documents or texts that are missing, malformed or too few."""


class HubError(DataError):
    """A repository of the hub that is missing, private, out of reach, or not in the cache."""


class SplitError(FreeMoEError, ValueError):
    """An attempt to search or choose on the split that is reported."""


class FamilyError(FreeMoEError, ValueError):
    """A model whose layout is unknown or cannot be edited."""


class NumericError(FreeMoEError, ValueError):
    """NaN or infinity where a number is needed."""


class ArtifactError(FreeMoEError, OSError):
    """An artefact that is truncated, edited, for another base, or in the way."""


class LockedError(ArtifactError):
    """An output that another process is writing."""


class DiskError(ArtifactError):
    """A disk that is full, read-only or gone, in the middle of a run: what was finished is kept."""


class VersionError(FreeMoEError, ImportError):
    """A name of another package that the installed release does not have."""


class WorkerError(FreeMoEError, RuntimeError):
    """A process that was to do a part of the work and died."""


class BusyError(FreeMoEError, RuntimeError):
    """A model that another thread or task is using, where waiting was not wanted or would never end."""


class SandboxError(FreeMoEError, RuntimeError):
    """Generated code that must not be run, or cannot be run safely here."""
