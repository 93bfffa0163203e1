"""`python -m dsec.client.verifier`: re-executes sessions in a process like a worker's.

Bits may depend on the number of threads and on the hash seed, which only a new process can have
as workers have them; and user code that crashes takes this process with it and nothing else. It
reads from standard input where the log is, then session ids, a line each, and writes a JSON line
for each: in the environment or among the arguments, user code could read the log's password.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO
from uuid import UUID

from dsec.client.told import last_line
from dsec.client.verdicts import end_of, unverified, verdict_json
from dsec.platform import virtual
from dsec.platform.bounded import Bounded
from dsec.platform.copies import ending_copies
from dsec.platform.interposition import interposition_of
from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.platform.parent import die_with_parent
from dsec.platform.settings import configure_logging
from dsec.platform.specs import Absent, SpecMissing, blob_content, registered_content
from dsec.replay.verify import Verdict, request_of, verify
from dsec.reward.score import Asks, RewardError, Score, Scorer, is_per_episode, load_scorer
from dsec.session.divergence import Divergence
from dsec.session.log_row import LogRow
from dsec.session.program import Program, ProgramError, load_program, session_config
from dsec_contracts import SYSTEM_SESSION, keys
from dsec_contracts.canonical import decode

POLICY_NOT_FOUND = "policy_not_found"
POLICIES_MAX = 16
"""Weights kept in memory; the oldest go first."""


class Verifier:
    """Verifies sessions of one log; programs, scorers and weights are loaded once."""

    def __init__(
        self, log: LogReader, object_store_url: str, credentials: Mapping[str, str]
    ) -> None:
        self._log = log
        self._objects = ObjectStore(object_store_url, credentials) if object_store_url else None
        self._programs: dict[tuple[str, str], Program] = {}
        self._scorers: dict[str, Scorer] = {}
        self._weights: Bounded[str, bytes] = Bounded(POLICIES_MAX)

    async def verify(self, session_id: UUID) -> dict[str, Any]:
        """The verdict on one session, ready for JSON."""
        rows = await self._log.rows(session_id)
        request = request_of(rows)
        if request is None:
            return unverified(session_id, "the log has no such session")
        try:
            program = await self._program(request.agent_spec, request.env_spec)
            policy_state = await self._policy(request.policy, rows)
        except ProgramError as error:
            return verdict_json(session_id, _unloadable(rows, error), end_of(rows))
        except Absent as absent:
            if (end_of(rows) or {}).get("code") != absent.code:
                raise
            # What it ended for is so still.
            return verdict_json(session_id, Verdict(0, None, None, 0, True), end_of(rows))
        scorer = await self._scorer(request.reward_fn_hash)
        config = session_config(
            request,
            program,
            policy_state=policy_state,
            reward_per_episode=scorer.per_episode,
        )
        verdict = verify(
            rows,
            program,
            config,
            scorer,
            interposition=interposition_of(*program.namespaces),
            get_blob=self._objects.get if self._objects is not None else None,
        )
        return verdict_json(session_id, verdict, end_of(rows))

    async def _program(self, agent: str, env: str) -> Program:
        if (agent, env) not in self._programs:
            contents = await self._content("agent", agent), await self._content("env", env)
            with ending_copies():
                self._programs[agent, env] = load_program(agent, contents[0], env, contents[1])
        return self._programs[agent, env]

    async def _scorer(self, spec_hash: str) -> Scorer:
        if spec_hash not in self._scorers:
            try:
                content = await self._content("reward", spec_hash)
            except Absent as absent:  # its steps can be verified all the same
                return _absent_scorer(absent)
            self._scorers[spec_hash] = guarded(spec_hash, content)
        return self._scorers[spec_hash]

    async def _content(self, what: str, spec_hash: str) -> bytes:
        """The bytes of a spec.

        Raises:
            Absent: it is not there, or what is there has another hash.
            ObjectStoreError: its blob is damaged, or the store is away.
        """
        spec = await self._log.spec(spec_hash)
        if spec is None:
            raise SpecMissing(f"{what} spec {spec_hash} is not in the log: register it again")
        return await registered_content(self._objects, spec, what)

    async def _policy(self, policy: str | None, rows: list[LogRow]) -> Any:
        """The state of a policy.

        Raises:
            ProgramError: the log does not have it, or it cannot be decoded; or its blob is not
                there, and that is what the session ended for.
            Absent: its blob is not there.
            ObjectStoreError: its blob is damaged, or the store is away.
        """
        if policy is None:
            return None
        if policy not in self._weights:
            name, _, version = policy.partition("@")
            row = await self._log.row(SYSTEM_SESSION, keys.policy(name, version))
            if row is None:
                raise ProgramError(POLICY_NOT_FOUND, "policy", f"the log has no policy {policy}")
            blob = decode(row.fact)["blob"]
            try:
                content = blob_content(self._objects, blob, f"policy {policy}")
            except Absent as absent:
                if (end_of(rows) or {}).get("code") != POLICY_NOT_FOUND:
                    raise
                raise ProgramError(POLICY_NOT_FOUND, "policy", str(absent)) from absent
            self._weights.remember(policy, content)
        try:
            return decode(self._weights[policy])
        except ValueError as error:
            raise ProgramError("policy_invalid", "policy", f"{policy}: {error}") from error


class _Guarded(Scorer):
    """A scorer whose every failure, of loading too, is a reward that cannot be had.

    It is found where it is compared with the record: a function that did not load when the session
    ran does not load now, and that is no difference.
    """

    def __init__(self, load: Callable[[], Scorer], *, per_episode: bool) -> None:
        self.per_episode = per_episode
        self._scorer: Scorer | None = None
        self._refusal: RewardError | None = None
        try:
            with ending_copies():
                self._scorer = load()
        except RewardError as error:
            self._refusal = error
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it is user code's
            self._refusal = RewardError("reward_load_failed", repr(error))
        self.needs_prior = self._scorer is not None and self._scorer.needs_prior

    def score(
        self,
        step_fact: bytes,
        observation: bytes | None,
        next_observation: bytes | None,
        responses: bytes = b"",
    ) -> Score:
        """See `Scorer`."""
        if self._scorer is None:
            assert self._refusal is not None
            raise self._refusal
        try:
            with ending_copies():
                return self._scorer.score(step_fact, observation, next_observation, responses)
        except Asks:
            raise
        except RewardError as error:
            raise RewardError(error.code, last_line(error.message)) from error
        except BaseException as error:  # SystemExit too: it is user code's
            raise RewardError("reward_raised", repr(error)) from error


def guarded(spec_hash: str, content: bytes) -> Scorer:
    """The scorer of a reward spec, as the scoring process has it; never raises but `RewardError`,
    and that only when it scores."""
    load = partial(load_scorer, spec_hash, content, interposition_of)
    return _Guarded(load, per_episode=is_per_episode(content))


def _absent_scorer(absent: Absent) -> Scorer:
    """Of a spec that cannot be had: every reward is missing for that."""

    def load() -> Scorer:
        raise RewardError(absent.code, str(absent))

    return _Guarded(load, per_episode=False)


def _unloadable(rows: list[LogRow], error: ProgramError) -> Verdict:
    """Code that does not load now: the same as recorded if that is how the session ended."""
    ended = end_of(rows) or {}
    if ended.get("code") == error.code:
        return Verdict(0, None, None, 0, True)
    divergence = Divergence(None, error.field, ended.get("code"), f"{error.code}: {error}")
    return Verdict(0, divergence, None, 0, False)


async def _serve(answers: TextIO) -> None:
    where = json.loads(sys.stdin.readline())
    log = await LogReader.connect(where["database_url"])
    verifier = Verifier(log, where["object_store_url"], where["object_store_credentials"])
    answers.write("ready\n")
    answers.flush()
    try:
        for line in sys.stdin:
            session_id = UUID(line.strip())
            try:
                answer = await verifier.verify(session_id)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the next one may be verified
                answer = unverified(session_id, str(error) or repr(error))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        await log.close()


def main() -> None:
    """Serve until standard input ends."""
    die_with_parent()
    configure_logging("verifier", "WARNING")
    # What user code prints must not end up between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        virtual.install()
        asyncio.run(_serve(answers))


if __name__ == "__main__":
    main()
