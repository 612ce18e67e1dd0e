"""Whether the hub can be reached, found once, and what to say when it cannot or will not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from freemoe.compat.hub_client import hub_offline, limit_hub_retries
from freemoe.core.errors import HubError

PATIENCE = 2.0
"""Seconds after which a hub that does not answer is out of reach."""

REMEMBERED = 60.0
"""Seconds for which that is believed."""

LOGIN = "set HF_TOKEN, or run `hf auth login`"

# Endpoint -> when it was asked, and why it could not be reached; empty where it answered.
_asked: dict[str, tuple[float, str]] = {}


def hub_endpoint() -> str:
    """Address of the hub (``HF_ENDPOINT``)."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def out_of_reach() -> str:
    """Why the hub cannot be asked; empty where it can.

    It is asked for an answer of any kind once, for `PATIENCE` seconds at most, in place of every client's own waiting.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    where = hub_endpoint()
    known = _asked.get(where)
    if known is None or time.monotonic() - known[0] > REMEMBERED:
        known = _asked[where] = time.monotonic(), _probe_endpoint(where)
    return known[1]


def _probe_endpoint(where: str) -> str:
    """Ask an endpoint for anything; in a thread, as the look-up of a name knows no limit of time."""
    from huggingface_hub.utils import get_session

    found = [f"no answer within {PATIENCE:g} seconds"]

    def send_request() -> None:
        try:
            get_session().head(where, timeout=PATIENCE)
            found[0] = ""
        except Exception as error:  # the client's own kinds, and those of the proxy, of TLS and of the resolver
            found[0] = str(error).splitlines()[0] if str(error) else type(error).__name__

    thread = threading.Thread(target=send_request, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found[0] and f"the hub at {where} cannot be reached ({found[0]})"


@contextmanager
def hub_session(local: bool = False, again: int = 0) -> Iterator[str]:
    """Inside, the hub's client may be used; yields why it only looks into the cache, empty where it may ask.

    It may ask ``again`` so often; a file's header is asked for twice in any case.
    """
    closed = "local_files_only is set" if local else out_of_reach()
    with limit_hub_retries(again), hub_offline() if closed else nullcontext():
        yield closed


def hub_error(what: str, error: Exception, closed: str = "", token: str | bool | None = None) -> HubError:
    """The one message for whatever the client raised. ``what`` was asked for: ``repository 'owner/name'``."""
    from huggingface_hub import errors

    # What the hub answered stands behind what the client made of it.
    while not closed and getattr(error, "response", None) is None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    answer = getattr(error, "response", None)
    status = f" (HTTP {answer.status_code})" if answer is not None else ""
    first = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    if closed:
        missing = "only a part of it is" if isinstance(error, errors.IncompleteSnapshotError) else "it is not"
        return HubError(
            f"The {what}: {missing} in the cache, and {closed}. Connect once to fetch it, or give a folder."
        )
    if isinstance(error, errors.HFValidationError):
        return HubError(f"The {what}: this is no name of a repository. Write owner/name, or owner/name@revision.")
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"The {what} is open only to those who accepted its terms{status}: accept them at {hub_endpoint()}, then {LOGIN}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"The {what} has no such revision{status}. Name a branch, a tag or a commit of it; main is usual."
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status.endswith("401)"):
        return not_found_error(what, status, token)
    if status.endswith("403)"):
        return HubError(f"The {what}: the hub forbids it{status}. Use a token with the right to do this: {LOGIN}.")
    if status.endswith("404)") or isinstance(error, errors.FileMetadataError):
        return HubError(
            f"The {what}: {hub_endpoint()} does not answer as a hub does{status}: {first}. Check HF_ENDPOINT."
        )
    return HubError(f"The {what}: the hub at {hub_endpoint()} failed{status}: {first}. Try again later.")


def not_found_error(what: str, status: str = "", token: str | bool | None = None) -> HubError:
    """The hub does not tell what is private from what is not there, so neither can the message."""
    from huggingface_hub import get_token

    sent = (
        "the token that was sent may not see it"
        if isinstance(token, str) or get_token()
        else f"no token was sent ({LOGIN})"
    )
    return HubError(
        f"The {what} cannot be read at {hub_endpoint()}{status}: there is none of this name, or it is private and {sent}. Check its "
        "name; did you mean a folder? There is none of this name here."
    )
