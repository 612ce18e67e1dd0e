"""Which models there are, experts that come and go, and what the router says of a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freemoe.core.errors import FreeMoEError
from freemoe.core.neutral import one_line
from freemoe.recipes.expert_names import PREFIX
from freemoe.serve.engine.routing import subdomain_probabilities
from freemoe.serve.http.bodies import LoadBody, RouteBody
from freemoe.serve.http.errors import RequestError
from freemoe.serve.http.preparing import RequestPreprocessor


class ExpertService:
    """Lists models, loads, drops and lists experts, and asks the router.

    Experts may be loaded from ``roots`` and from below them.
    """

    def __init__(self, preparing: RequestPreprocessor, roots: Sequence[Path]) -> None:
        self._preparing, self._engine, self._experts = preparing, preparing.engine, preparing.experts
        self._began, self._roots = int(time.time()), [root.resolve() for root in roots]
        self._cached: tuple[tuple[int, list[str]], list[dict[str, Any]]] | None = None

    async def models(self) -> Any:
        """``GET /v1/models``: what a request's ``model`` can be."""
        return {"object": "list", "data": [self._model_entry(name) for name in self._preparing.served_models]}

    async def model(self, name: str) -> Any:
        """``GET /v1/models/NAME``, of a combination too."""
        self._preparing.expert_of(name)
        return self._model_entry(name)

    def _model_entry(self, name: str) -> dict[str, Any]:
        found = {"id": name, "object": "model", "created": self._began, "owned_by": "freemoe"}
        rejected = name.removeprefix(PREFIX) in self._experts.catalogue.rejected_experts
        return found | ({"rejected": True} if rejected else {})

    async def experts(self) -> dict[str, Any]:
        """``GET /v1/freemoe/experts``: each with what it switches off and what its build measured."""
        state = self._experts.catalogue.version, self._experts.catalogue.expert_names
        if self._cached is None or self._cached[0] != state:
            for name in state[1]:
                await self._experts.ensure_loaded(name)
            rows = await asyncio.wrap_future(self._engine.run_between_steps(self._expert_rows))
            self._cached = state, [rows[name] for name in state[1] if name in rows]
        return {"object": "list", "data": self._cached[1]}

    def _expert_rows(self) -> dict[str, dict[str, Any]]:
        host = self._engine.host
        summary = getattr(host, "expert_summary", None)
        rows = [{"name": name} for name in host.experts] if summary is None else summary()
        return {row["name"]: {"object": "freemoe.expert", **row} for row in rows}

    async def load(self, body: LoadBody) -> dict[str, Any]:
        """``POST /v1/freemoe/experts``: the names under which its experts can be asked for now."""
        if body.artefact_path is None:
            raise RequestError(400, "Name the artefact's folder as path.", param="path")
        folder = self._allowed_folder(body.artefact_path)
        try:
            names = await self._experts.load_experts(folder, body.prefix)
        except FreeMoEError as error:
            # What is said of files names them in full, which is nobody's business over HTTP.
            said = str(error).replace(str(folder), body.artefact_path)
            raise RequestError(400, said, param="path", code="bad_artefact") from None
        return {"object": "freemoe.loaded", "loaded": names, "models": [f"base:{name}" for name in names]}

    def _allowed_folder(self, place: str) -> Path:
        """A folder that may be read.

        Raises:
            RequestError: It is outside of those that may be, or not there; which of the two is not said.
        """
        refused = RequestError(
            403,
            f"{one_line(place, 100)!r} is no artefact below the folders that experts are loaded from. They were named when the "
            "server was started: --experts and --expert-root.",
            param="path",
            code="path_not_allowed",
        )
        for root in self._roots:
            try:
                folder = (root / place).resolve()
                inside = folder.is_relative_to(root) and (folder / "freemoe_config.json").is_file()
            except (OSError, ValueError, RuntimeError):
                continue
            if inside:
                return folder
        raise refused

    async def drop(self, name: str) -> dict[str, Any]:
        """``DELETE /v1/freemoe/experts/NAME``: nobody can ask for it any more; who did gets the answer."""
        await self._experts.drop_expert(self._preparing.expert_of(name))
        return {"object": "freemoe.expert", "name": name, "deleted": True}

    async def route(self, body: RouteBody) -> dict[str, Any]:
        """``POST /v1/freemoe/route``: which expert ``auto`` would be, and how likely each subdomain is."""
        if (body.prompt is None) == (body.messages is None):
            raise RequestError(400, "Give prompt or messages, one of the two.", param="prompt")
        if body.prompt is not None:
            ids = await self._preparing.text_ids(body.prompt)
        else:
            ids = await self._preparing.chat_ids(body.messages or [])
        host = self._engine.host
        # What the router reads is bounded like any prompt.
        ids = ids[: self._engine.limits.context]
        [picked] = await self._preparing.route_prompts([ids])
        rows = await asyncio.wrap_future(self._engine.run_between_steps(lambda: subdomain_probabilities(host, ids)))
        return {
            "expert": picked.expert,
            "confidence": picked.confidence,
            "subdomains": [{"name": name, "probability": round(p, 6)} for name, p in rows],
        }
