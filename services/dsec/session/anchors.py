"""Capturing a session's state, so that a restart need not begin at step 0.

An anchor is taken right behind an environment step, before the step's reward is heard. There the
machine has named all that it was given, so its position is a handful of fields, and everything is a
function of the inputs that came before: a re-execution takes the same anchors at the same places.
That is what an anchor's *fact* says, and what is compared: position, chain, the agent's state where
it has canonical bytes, why it was taken, and the anchor before it. Anchors enter no chain: chains
are made of steps, and a session has the same one with anchors and without.

The *blob* is what a machine is made from again: environment, agent, observation and action space
in one pickle (what they share, they share again), chance, the machine's own position, and what the
state probe remembers. Its bytes differ between equal states, so they are no part of the fact.

`Anchoring` is a part of `SessionMachine` and knows its fields. A session without anchors has none,
and pays one comparison a step.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import lz4.frame

from dsec.session import chance as chances
from dsec.session.adapters.gymnasium import EnvError, GymnasiumAdapter
from dsec.session.chance import Chance
from dsec.session.documents import Anchors
from dsec.session.late import plain_turn
from dsec.session.raised import is_ours, told_in_a_line
from dsec.session.seeds import derive
from dsec.session.state_anchor import WHOLE, StateAnchor
from dsec.session.stops import run_user
from dsec_contracts.anchor import (
    ANCHOR_BLOB_BYTES_MAX,
    ANCHOR_STATE_BYTES_MAX,
    ANCHOR_TAGS_MAX,
)
from dsec_contracts.canonical import decode, encode
from dsec_contracts.step import STEP_FIELDS

if TYPE_CHECKING:
    from dsec.session.machine import SessionMachine

FOLD_VERSION = 1
"""Of what a blob holds. A blob of another version is not restored, and its session re-executed."""
PICKLE_PROTOCOL = 5
_STATE_HASH, _RESET = STEP_FIELDS.index("state_hash"), STEP_FIELDS.index("reset")


class NotCaptured(Exception):
    """State that cannot be captured. Says whose, and why."""


class Taken(NamedTuple):
    """Output: an anchor. All but `position` and `freeze` is what a re-execution must give again."""

    position: int
    anchor_id: str
    content: bytes
    covers_agent: bool
    tags: tuple[str, ...]
    parents: tuple[str, ...]
    freeze: Callable[[], bytes]
    """Gives the blob. Only while the anchor is being taken: the session goes on.

    Raises:
        NotCaptured: the state cannot be pickled, or does not come back whole.
    """

    @property
    def fact(self) -> tuple[Any, ...]:
        """What is compared."""
        return self[:6]


OnAnchor = Callable[[Taken], None]


def anchor_id(seed: int, position: int, content: bytes) -> str:
    """The id of an anchor: 32 hexadecimal digits from seed, position in the session and content."""
    named = b"dsec.anchor.id.1\n%d\n%d\n%b" % (seed, position, content)
    return hashlib.sha256(named).hexdigest()[:32]


def restorer(agent: Any) -> Callable[[Any], Any] | None:
    """What takes an agent's state back, or None: such an agent is captured whole."""
    for name in ("set_state", "load_state"):
        if callable(found := getattr(agent, name, None)):
            return found  # type: ignore[no-any-return]
    return None


class Anchoring:
    """When a session's anchors are taken, and what they are."""

    __slots__ = (
        "_at_episode_start",
        "_every_steps",
        "_is_delayed",
        "_proven",
        "delayed_at",
        "given",
        "last_id",
    )

    def __init__(self, anchors: Anchors) -> None:
        self._every_steps = anchors.every_steps
        self._at_episode_start = anchors.at_episode_start
        self._proven = False
        self.given: StateAnchor | None = None
        """What the agent asked for with the step that is being taken."""
        self.last_id: str | None = None
        self._is_delayed = False
        self.delayed_at: int | None = None
        """The position of the last deferral that asked for an anchor."""

    def delayed(self, position: int, apart_steps: int) -> None:
        """A reward was deferred: what the agent is now, before it goes on without it, is worth
        keeping. Behind the step that follows, and not again within so many steps."""
        if self.delayed_at is None or position - self.delayed_at >= apart_steps:
            self._is_delayed, self.delayed_at = True, position

    @classmethod
    def of(cls, anchors: Anchors) -> Anchoring | None:
        """None where the spec asks for no anchors."""
        return cls(anchors) if anchors.every_steps or anchors.at_episode_start else None

    def after_step(self, machine: SessionMachine) -> None:
        """Take an anchor, if one is due behind the step that was just taken."""
        given, self.given = self.given, None
        tags = self._tags(machine)
        if given is not None:
            tags = (*tags, "agent", *given.tags)
        if self._is_delayed:
            self._is_delayed = False
            if run_user("agent_raised", _gives_state, machine._agent):
                tags = (*tags[: ANCHOR_TAGS_MAX - 1], "delayed_reward")
        if not tags or machine._pending_stop is not None:
            return
        agent, is_whole = run_user("agent_raised", _agent_state, machine._agent, given)
        covered = None
        if machine.deterministic and not is_whole:
            covered = _covered(agent)
        assert machine.chain is not None
        parts = b"dsec.anchor.1", machine.chain, b"" if covered is None else covered
        content = hashlib.sha256(b"".join(parts)).digest()
        name = anchor_id(machine.config.seed, machine.steps, content)
        parents = () if self.last_id is None else (self.last_id,)
        self.last_id = name

        def freeze() -> bytes:
            blob, self._proven = _frozen(machine, name, agent, is_whole, self._proven), True
            return blob

        if machine.on_anchor is not None:
            tags = tuple(dict.fromkeys(tags))
            taken = Taken(machine.steps, name, content, covered is not None, tags, parents, freeze)
            machine.on_anchor(taken)

    def _tags(self, machine: SessionMachine) -> tuple[str, ...]:
        every = self._every_steps and machine.steps % self._every_steps == 0
        begins = self._at_episode_start and not machine._episode_begun
        return ("every_steps",) * bool(every) + ("episode_start",) * bool(begins)


def _agent_state(agent: Any, given: StateAnchor | None) -> tuple[Any, bool]:
    """The agent's state, and whether it is the agent itself. Runs user code."""
    if given is not None and given.state is not WHOLE:
        return given.state, False
    return (agent.get_state(), False) if _gives_state(agent) else (agent, True)


def _gives_state(agent: Any) -> bool:
    """Whether an agent says itself what its state is, and takes it back. Runs user code."""
    return restorer(agent) is not None and callable(getattr(agent, "get_state", None))


def _covered(state: Any) -> bytes | None:
    """The canonical bytes of a state. None where it has none, or where a container of the user's
    own class raises: it is not compared, then, and `covers_agent` says so."""
    try:
        return encode(state)
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 - see above
        return None


def _frozen(machine: SessionMachine, name: str, agent: Any, is_whole: bool, proven: bool) -> bytes:
    """The blob of a machine that has just taken a step.

    Raises:
        NotCaptured: see `Taken.freeze`.
    """
    space = machine._given["action_space"]
    parts = (machine._env.env, agent, machine._observation, machine._info, machine._final, space)
    late = machine.late
    parts += () if late is None else (late.told(),)
    memory, hashed = machine._env.memory(), last_state_hash(machine)
    with aside(machine):
        try:
            objects = pickle.dumps(parts, PICKLE_PROTOCOL)
        except MemoryError:
            raise
        except BaseException as error:
            raise NotCaptured(_whose(machine, agent, error)) from error
        if not proven:
            _prove(objects, memory, hashed)
    told = {
        "fold_version": FOLD_VERSION,
        "anchor_id": name,
        "is_whole": is_whole,
        "machine": _position_of(machine),
        "chance": machine._chance.get_state(),
        "memory": memory,
        "objects": objects,
    }
    if late is not None:
        told["late"] = late.outstanding()
    if machine._curriculum is not None:
        told["curriculum"] = machine._curriculum.position()
    state = encode(told)
    if len(state) > ANCHOR_STATE_BYTES_MAX:
        raise NotCaptured(f"{len(state)} bytes of state; an anchor takes {ANCHOR_STATE_BYTES_MAX}")
    blob: bytes = lz4.frame.compress(state, store_size=True)
    if len(blob) > ANCHOR_BLOB_BYTES_MAX:
        raise NotCaptured(f"{len(blob)} bytes compressed; a blob takes {ANCHOR_BLOB_BYTES_MAX}")
    return blob


def _prove(objects: bytes, memory: dict[str, Any], hashed: bytes) -> None:
    """Once a session: what is pickled comes back whole."""
    try:
        GymnasiumAdapter.resumed(pickle.loads(objects)[0], memory, hashed)
    except MemoryError:
        raise
    except BaseException as error:
        if is_ours(error) and isinstance(error, EnvError):
            raise NotCaptured(str(error)) from error
        why = told_in_a_line(error)
        raise NotCaptured(f"what was pickled cannot be loaded: {why}") from error


def _whose(machine: SessionMachine, agent: Any, error: BaseException) -> str:
    for whose, part in (("environment", machine._env.env), ("agent's state", agent)):
        try:
            pickle.dumps(part, PICKLE_PROTOCOL)
        except MemoryError:
            raise
        except BaseException as own:  # noqa: BLE001 - told, and the other is raised
            return f"the {whose} cannot be pickled: {told_in_a_line(own)}"
    return f"the state cannot be pickled: {told_in_a_line(error)}"


@contextmanager
def aside(machine: SessionMachine) -> Iterator[None]:
    """What user code draws while it is pickled or loaded is not drawn from the session's chance: a
    re-execution does neither."""
    held = chances.current()
    seed = derive(machine.config.seed, "anchor", machine.steps)
    chances.slot.chance = Chance(seed)
    try:
        yield
    finally:
        chances.slot.chance = held


def last_state_hash(machine: SessionMachine) -> bytes:
    """What the environment's `state_hash` gave last: behind a reset, where there was one."""
    assert machine.last is not None
    fact = decode(machine.last.fact)
    hashed: bytes = fact[_STATE_HASH] if fact[_RESET] is None else fact[_RESET][0]
    return hashed


def _position_of(machine: SessionMachine) -> dict[str, Any]:
    """The fields of a machine that has just taken a step; what it was given it has named."""
    last = machine.last
    assert last is not None
    assert not machine._inputs
    assert machine._turns is None or not machine._turns.under_way
    anchoring = machine._anchors
    delayed_at = None if anchoring is None else anchoring.delayed_at
    position = {} if delayed_at is None else {"delayed_at": delayed_at}
    if machine.config.reward_per_episode:
        position["episode_first"] = machine._episode_first
    return position | {
        "step": machine._step,
        "episode": machine._episode,
        "done_episodes": machine._done_episodes,
        "episode_begun": machine._episode_begun,
        "chain": machine.chain,
        "caused_by": machine._caused_by,
        "prior": machine._prior,
        "last": list(last._replace(called=None)),
        "called": None if last.called is None else plain_turn(last.called),
    }
