"""What sessions start from: programs, reward specs and policies, loaded once a worker.

All of it is named by hashes, so whatever was loaded stays right. A session whose parts are absent
for good fails to start; one whose parts are away is handed back, and starts another time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from time import monotonic_ns
from typing import Any, NamedTuple

from dsec.env_runtime.running import RunningSlot
from dsec.platform.bounded import Bounded
from dsec.platform.interposition import interposition_of
from dsec.platform.log import LogBehind, LogReader
from dsec.platform.objects import ObjectStore, ObjectStoreError
from dsec.platform.specs import Absent, blob_content, spec_content
from dsec.platform.virtual import undeclared_uses
from dsec.session.documents import RewardDocument, SpecError, unseal
from dsec.session.interposition import Interposition
from dsec.session.program import Program, ProgramError, load_program
from dsec.session.recorded import Recorded
from dsec_contracts import SYSTEM_SESSION, keys
from dsec_contracts.canonical import decode
from dsec_contracts.session import RequestFact

log = logging.getLogger(__name__)

PROGRAMS_MAX = 64
POLICIES_MAX = 16
REWARD_SPECS_MAX = 1024
SPEC_WAIT_S = 30.0


class Tail(NamedTuple):
    """The position of an attempt's own placement: what came before it is in the log."""

    sequence: int
    epoch: int | None
    """None where the placement does not say: the epoch that the log is in."""


class NotNow(Exception):
    """A session that cannot be opened because something is away. It is handed back, not ended."""


class StartFailed(Exception):
    """A session that cannot start, with the code it ends with."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.recorded: Recorded | None = None
        """What an earlier attempt left in the log, which the end has to close."""


@contextlib.contextmanager
def starting(absent_code: str) -> Iterator[None]:
    """What is absent ends the session with this code; while something is away it is handed back."""
    try:
        yield
    except Absent as absent:
        raise StartFailed(absent_code, str(absent)) from absent
    except (LogBehind, ObjectStoreError) as error:
        raise NotNow(str(error)) from error


class Rewarding(NamedTuple):
    """What a reward function needs of its sessions."""

    wants_prior: bool
    """The observation before each step goes with it."""
    per_episode: bool
    """It scores whole episodes."""


class Loaded(NamedTuple):
    """A program, and what keeps its sessions apart."""

    program: Program
    interposition: Interposition
    undeclared_uses: str
    """The clocks and generators that packages behind it captured before they were redirected, as
    `module.name` joined by commas: what they give is the process's own."""

    @classmethod
    def of(cls, program: Program) -> Loaded:
        """Find out what a program needs."""
        found = set().union(*(undeclared_uses(code) for code in program.namespaces))
        if found:
            log.warning("real clocks or chance, captured by a package: %s", sorted(found))
        return cls(program, interposition_of(*program.namespaces), ", ".join(sorted(found)))


class Library:
    """Programs and policies by hash, loaded once a worker. Bounded; the oldest go first."""

    def __init__(self, log: LogReader, objects: ObjectStore | None, running: RunningSlot) -> None:
        self._log = log
        self._running = running
        self._objects = objects
        self._programs: Bounded[tuple[str, str], Loaded] = Bounded(PROGRAMS_MAX)
        self._policies: Bounded[str, bytes] = Bounded(POLICIES_MAX)
        self._rewarding: Bounded[str, Rewarding] = Bounded(REWARD_SPECS_MAX)
        self._looking: dict[object, asyncio.Event] = {}

    async def _content(self, spec_hash: str, kind: str, tail: Tail) -> bytes:
        with starting("spec_not_found"):
            return await spec_content(
                self._log,
                self._objects,
                kind,
                spec_hash,
                tail.sequence,
                SPEC_WAIT_S,
                epoch=tail.epoch,
            )

    async def program(self, request: RequestFact, index: int, tail: Tail) -> Loaded:
        """The program of a request. Its import is user code, run in the session's name.

        Raises:
            StartFailed: a spec is missing, or its code does not load.
        """
        key = (request.agent_spec, request.env_spec)
        if key not in self._programs:
            async with self._one_looks(key):
                if key not in self._programs:
                    await self._load(key, request, index, tail)
        loaded = self._programs.recall(key)
        assert loaded is not None
        return loaded

    async def _load(
        self, key: tuple[str, str], request: RequestFact, index: int, tail: Tail
    ) -> None:
        agent = await self._content(request.agent_spec, "agent", tail)
        env = await self._content(request.env_spec, "env", tail)
        if key not in self._programs:
            program = self._loaded(request, agent, env, index)
            self._programs.remember(key, Loaded.of(program))

    @contextlib.asynccontextmanager
    async def _one_looks(self, key: object) -> AsyncIterator[None]:
        """Of many that start together one reads what they share, and the others find it. Where that
        one finds nothing, each looks for itself, for as long as its own placement allows."""
        if (looking := self._looking.get(key)) is not None:
            await looking.wait()
            yield
            return
        self._looking[key] = looking = asyncio.Event()
        try:
            yield
        finally:
            del self._looking[key]
            looking.set()

    def _loaded(self, request: RequestFact, agent: bytes, env: bytes, index: int) -> Program:
        self._running.enter(index, 0, monotonic_ns())
        try:
            return load_program(request.agent_spec, agent, request.env_spec, env)
        except ProgramError as error:
            raise StartFailed(error.code, str(error)) from error
        except MemoryError:
            self._running.end_out_of_memory()
        finally:
            self._running.end_if_forked()  # before it clears what it shares with us
            self._running.clear()

    async def rewarding(self, spec_hash: str, tail: Tail) -> Rewarding:
        """What a reward function needs of its sessions."""
        if (found := self._rewarding.recall(spec_hash)) is None:
            async with self._one_looks(spec_hash):
                if (found := self._rewarding.recall(spec_hash)) is None:
                    found = await self._load_reward(spec_hash, tail)
        return found

    async def _load_reward(self, spec_hash: str, tail: Tail) -> Rewarding:
        content = await self._content(spec_hash, "reward", tail)
        try:
            document, _ = unseal(content, "reward")
        except SpecError as error:
            raise StartFailed("spec_invalid", f"reward_fn_hash: {error}") from error
        assert isinstance(document, RewardDocument)
        per_episode = document.per == "episode"
        # What it needs of a whole episode is read from the log.
        found = Rewarding(document.entry != "env" and not per_episode, per_episode)
        self._rewarding.remember(spec_hash, found)
        return found

    def result(self, blob: str) -> bytes:
        """The result of a tool that lies in the object store. Blocks.

        Raises:
            BlobMissing: the store does not have it, or there is none.
            ObjectStoreError: the store is away.
        """
        return blob_content(self._objects, blob, "the result of a tool")

    async def policy(self, version: str, tail: Tail) -> Any:
        """The state of a pinned policy, `name@version`, decoded anew for each session.

        Raises:
            StartFailed: it is absent, or cannot be decoded.
        """
        if version not in self._policies:
            async with self._one_looks(version):
                if version not in self._policies:
                    await self._load_policy(version, tail)
        content = self._policies.recall(version)
        assert content is not None
        return decode(content)

    async def _load_policy(self, version: str, tail: Tail) -> None:
        key = keys.policy(*version.split("@", 1))
        row = await self._log.row(SYSTEM_SESSION, key)
        with starting("policy_not_found"):
            if row is None:
                await self._log.wait_floor(tail.sequence, SPEC_WAIT_S, epoch=tail.epoch)
                row = await self._log.row(SYSTEM_SESSION, key)
            if row is None:
                raise StartFailed("policy_not_found", f"policy {version} is not in the log")
            blob, what = decode(row.fact)["blob"], f"policy {version}"
            content = await asyncio.to_thread(blob_content, self._objects, blob, what)
        try:
            decode(content)
        except ValueError as error:  # whoever published it wrote what they liked
            raise StartFailed("policy_invalid", f"{what} is not canonical: {error}") from error
        self._policies.remember(version, content)
