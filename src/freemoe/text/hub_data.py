"""Data sets of the hub, asked for once."""

from __future__ import annotations

from typing import Any

from freemoe.core.errors import DataError
from freemoe.hub.reach import hub_error, hub_session, not_found_error


def load_hub_data(repository: str, configuration: str | None, split: str) -> Any:
    """One split of a data set of the hub, or of the cache where the hub is out of reach.

    ``repository``: ``owner/name``. ``split``: ``train``, ``test`` and so on. Gives a `datasets.Dataset`.

    Raises:
        DataError: The package `datasets` is not installed, or the data set has no such configuration or split.
        HubError: There is no such data set, it is private, or it is neither in the cache nor in reach.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetNotFoundError
    except ImportError:
        raise DataError(
            f"The data set {repository!r} needs the package datasets, which is not installed. pip install 'freemoe[eval]'"
        ) from None
    what = f"data set {repository!r}"
    with hub_session() as closed:
        try:
            return datasets.load_dataset(repository, configuration, split=split)
        except DatasetNotFoundError as error:
            raise (hub_error(what, error, closed) if closed else not_found_error(what)) from error
        except ConnectionError as error:
            raise hub_error(what, error, closed) from error
        except Exception as error:  # of the hub's client and of datasets' readers, which know a dozen kinds
            if getattr(error, "response", None) is not None:
                raise hub_error(what, error) from error
            said = str(error).strip().splitlines()
            raise DataError(
                f"The {what} could not be read ({type(error).__name__}: {said[0] if said else 'no message'}). Asked for were "
                f"configuration {configuration!r} and split {split!r}."
            ) from error
