"""`python -m dsec.client.verifier`: re-executes sessions in a process like a worker's.

Bits may depend on the number of threads and on the hash seed, which only a new process can have
as workers have them; and user code that crashes takes this process with it and nothing else. It
reads session ids from standard input, a line each, and writes a JSON line for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, TextIO
from uuid import UUID

from dsec.client.plain import plain
from dsec.client.told import last_line
from dsec.platform import virtual
from dsec.platform.interposition import TorchInterposition, interposition_for
from dsec.platform.log import LogReader, LogRow
from dsec.platform.objects import ObjectStore
from dsec.platform.settings import Settings, configure_logging
from dsec.platform.virtual_torch import uses_torch
from dsec.replay.verify import Verdict, request_of, session_config, verify
from dsec.reward.score import RewardError, Scorer, load_scorer
from dsec.session.code import CodeNamespace
from dsec.session.machine import Interposition, PlainInterposition
from dsec.session.program import Program, ProgramError, load_program
from dsec.session.rerun import Divergence
from dsec_contracts import SYSTEM_SESSION, keys
from dsec_contracts.canonical import decode


class Verifier:
    """Verifies sessions of one log; programs, scorers and weights are loaded once."""

    def __init__(self, log: LogReader, object_store_url: str) -> None:
        self._log = log
        self._objects = ObjectStore(object_store_url) if object_store_url else None
        self._programs: dict[tuple[str, str], Program] = {}
        self._scorers: dict[str, Scorer] = {}
        self._weights: dict[str, bytes] = {}

    async def verify(self, session_id: UUID) -> dict[str, Any]:
        """The verdict on one session, ready for JSON."""
        rows = await self._log.rows(session_id)
        request = request_of(rows)
        if request is None:
            return _answer(session_id, error="the log has no such session")
        try:
            program = await self._program(request.agent_spec, request.env_spec)
        except ProgramError as error:
            return _unloadable(session_id, rows, error)
        try:
            scorer = await self._scorer(request.reward_fn_hash)
        except RewardError as error:
            return _answer(session_id, error=f"the reward function: {last_line(str(error))}")
        verdict = verify(
            rows,
            program,
            session_config(request, program, policy_state=await self._policy(request.policy)),
            scorer,
            interposition=interposition_for(program),
            get_blob=self._objects.get if self._objects is not None else None,
        )
        return _answer(session_id, verdict)

    async def _program(self, agent: str, env: str) -> Program:
        if (agent, env) not in self._programs:
            self._programs[agent, env] = load_program(
                agent, await self._content(agent), env, await self._content(env)
            )
        return self._programs[agent, env]

    async def _scorer(self, spec_hash: str) -> Scorer:
        if spec_hash not in self._scorers:
            content = await self._content(spec_hash)
            self._scorers[spec_hash] = load_scorer(spec_hash, content, _interpose)
        return self._scorers[spec_hash]

    async def _content(self, spec_hash: str) -> bytes:
        spec = await self._log.spec(spec_hash)
        if spec is None:
            return b""  # what loads it says that it is no spec
        return spec.content or self._blob(spec.blob or "")

    async def _policy(self, policy: str | None) -> Any:
        if policy is None:
            return None
        if policy not in self._weights:
            name, _, version = policy.partition("@")
            row = await self._log.row(SYSTEM_SESSION, keys.policy(name, version))
            if row is None:
                raise LookupError(f"the log has no policy {policy}")
            self._weights[policy] = self._blob(decode(row.fact)["blob"])
        return decode(self._weights[policy])

    def _blob(self, key: str) -> bytes:
        if self._objects is None:
            raise LookupError(
                f"blob {key[:12]} is needed and no object store is configured: set "
                "DSEC_OBJECT_STORE_URL"
            )
        return self._objects.get(key)


def _interpose(code: CodeNamespace) -> Interposition:
    return TorchInterposition() if uses_torch(code) else PlainInterposition()


def _unloadable(session_id: UUID, rows: list[LogRow], error: ProgramError) -> dict[str, Any]:
    """Code that does not load now: the same as recorded if that is how the session ended."""
    ends = (decode(row.fact) for row in rows if row.kind == "session.ended")
    ended: dict[str, Any] = next(ends, {})
    if ended.get("code") == error.code:
        return _answer(session_id, Verdict(0, None, None, 0, True))
    divergence = Divergence(None, error.field, ended.get("code"), f"{error.code}: {error}")
    return _answer(session_id, Verdict(0, divergence, None, 0, False))


def _answer(
    session_id: UUID, verdict: Verdict | None = None, *, error: str | None = None
) -> dict[str, Any]:
    first = verdict.first_divergence if verdict is not None else None
    return {
        "session_id": str(session_id),
        "ok": verdict is not None and verdict.ok,
        "steps": verdict.steps if verdict is not None else 0,
        "reward_ok": verdict.reward_ok if verdict is not None else None,
        "rewards_compared": verdict.rewards_compared if verdict is not None else 0,
        "complete": verdict is not None and verdict.complete,
        "first_divergence": None
        if first is None
        else {
            "step": first.step,
            "field": first.field,
            "expected": plain(first.expected),
            "actual": plain(first.actual),
        },
        "error": error,
    }


async def _serve(answers: TextIO) -> None:
    settings = Settings()
    log = await LogReader.connect(settings.database_url)
    verifier = Verifier(log, settings.object_store_url)
    try:
        for line in sys.stdin:
            session_id = UUID(line.strip())
            try:
                answer = await verifier.verify(session_id)
            except (LookupError, ValueError) as error:
                answer = _answer(session_id, error=str(error))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        await log.close()


def main() -> None:
    """Serve until standard input ends."""
    configure_logging("verifier", "WARNING")
    # What user code prints must not end up between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        virtual.install()
        asyncio.run(_serve(answers))


if __name__ == "__main__":
    main()
