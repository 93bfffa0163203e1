"""Who may do what on the bus: one table, from which NATS permissions are derived.

A service may publish the events that are its own, use its own durable consumers, and read the
answers to its own requests; everything else the server refuses. A new event is one more name in the
row of whoever publishes it, a new service is one more row.

What NATS cannot express and other means have to: a wildcard covers whole tokens only, so workers,
which share a user and name their consumers themselves, are kept from the services' consumers but
not from each other's; and a worker's own key in a subject is the fence's to guard. The server does
not look at reply subjects: who may call its API can have the answer put on any subject. None reads
as an event, so the recorder puts it aside, and none is taken for a call; on a fence's subject it
fences, like any message, and in a bucket it is an entry that its readers cannot read. Only accounts
of their own would refuse that.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from dsec_contracts import (
    anchor,
    curriculum,
    evaluation,
    reward,
    service,
    session,
    spec,
    step,
    subjects,
    tool,
    worker,
)
from dsec_contracts.envelope import Event

OPERATOR = "dsec"
"""The user that may do everything: it makes the stream, and repairs."""
_USER_PREFIX = "dsec-"
_ANYTHING = ">"
_STREAM = subjects.STREAM
_HEARTBEATS = subjects.every(worker.WorkerHeartbeat.event_name())

STREAM_INFO = f"STREAM.INFO.{_STREAM}"
MESSAGE_GET = f"STREAM.MSG.GET.{_STREAM}"
CONSUMER_LIST = f"CONSUMER.LIST.{_STREAM}"


@dataclass(frozen=True, slots=True)
class Durable:
    """A durable consumer. `only`: the one subject that it may be made for; where there are
    several, the server does not compare them with anything."""

    name: str
    only: str | None = None

    def calls(self) -> tuple[str, ...]:
        """The JetStream calls of its owner."""
        made_for = "" if self.only is None else f".{self.only}"
        named = tuple(f"CONSUMER.{verb}.{_STREAM}.{self.name}" for verb in _CONSUMER_VERBS)
        return (f"CONSUMER.CREATE.{_STREAM}.{self.name}{made_for}", *named)


_CONSUMER_VERBS = ("INFO", "DELETE", "MSG.NEXT")
_ANY_CONSUMER = Durable("*")


@dataclass(frozen=True, slots=True)
class Role:
    """What one service, or every client, may do.

    `also`: subjects beside those of its events. `calls`: of the JetStream API, without the prefix.
    `names_consumers`: it makes consumers under names that nobody knows beforehand. `hears`: what
    it may subscribe to beside the answers to its requests, which come under `inbox`.
    """

    name: str
    events: tuple[type[Event], ...]
    durables: tuple[Durable, ...] = ()
    calls: tuple[str, ...] = (STREAM_INFO,)
    also: tuple[str, ...] = ()
    hears: tuple[str, ...] = ()
    names_consumers: bool = False
    inbox: str = ""

    @property
    def user(self) -> str:
        """Its user on the server."""
        return f"{_USER_PREFIX}{self.name}"

    @property
    def inbox_prefix(self) -> str:
        """Where the answers to its requests come, and nobody else's."""
        return self.inbox or f"_INBOX_{self.name}"

    def may_publish(self) -> list[str]:
        """The subjects that it may publish to, JetStream's own included."""
        allowed = [subjects.every(event.event_name()) for event in self.events]
        calls = list(self.calls)
        for durable in (*self.durables, *((_ANY_CONSUMER,) if self.names_consumers else ())):
            calls += durable.calls()
            allowed += _acknowledgements(durable.name)
        allowed += [subjects.dead_letter(durable.name) for durable in self.durables]
        return sorted({*allowed, *self.also, *(f"$JS.API.{call}" for call in calls)})

    def must_not_publish(self) -> list[str]:
        """What it may not, though a wildcard above would let it: others' consumers."""
        if not self.names_consumers:
            return []
        others = [durable for role in ROLES if role is not self for durable in role.durables]
        calls = {f"$JS.API.{call}" for other in others for call in Durable(other.name).calls()}
        acknowledged = {ack for other in others for ack in _acknowledgements(other.name)}
        return sorted(calls | acknowledged)

    def may_subscribe(self) -> list[str]:
        """The subjects that it may subscribe to."""
        return [f"{self.inbox_prefix}.>", *self.hears]


def _acknowledgements(consumer: str) -> tuple[str, str]:
    """As a server writes them, without and with its domain and account."""
    return f"$JS.ACK.{_STREAM}.{consumer}.>", f"$JS.ACK.*.*.{_STREAM}.{consumer}.>"


SERVICES_BUCKET = "dsec_services"
"""What replicas of the reward service share about outside services: budgets and modes."""


TOOLS_BUCKET = "dsec_tools"
"""What replicas of the tool service share about tools: their quotas over all replicas."""


def _lease(name: str) -> tuple[str, ...]:
    """All that a lease in a bucket of its own needs."""
    return _bucket(f"dsec_lease_{name}")


def _bucket(bucket: str) -> tuple[str, ...]:
    """All that somebody who changes a bucket needs."""
    stream = f"KV_{bucket}"
    calls = [
        *(f"STREAM.{verb}.{stream}" for verb in ("CREATE", "INFO", "UPDATE", "MSG.GET")),
        f"DIRECT.GET.{stream}.>",
    ]
    return f"$KV.{bucket}.>", *(f"$JS.API.{call}" for call in calls)


def _reading(bucket: str) -> tuple[str, ...]:
    """The JetStream calls of somebody who reads a bucket."""
    return f"STREAM.INFO.KV_{bucket}", f"STREAM.MSG.GET.KV_{bucket}", f"DIRECT.GET.KV_{bucket}.>"


ROLES = (
    Role(
        "recorder",
        events=(),
        durables=(Durable("recorder"),),
        calls=(
            *(f"STREAM.{verb}.{_STREAM}" for verb in ("CREATE", "INFO", "UPDATE", "PURGE")),
            MESSAGE_GET,
            CONSUMER_LIST,
        ),
        hears=(_HEARTBEATS,),
    ),
    Role(
        "scheduler",
        events=(
            session.SessionRejected,
            session.SessionPlaced,
            session.SessionCancelRequested,  # at a deadline
            session.SessionEnded,
            worker.WorkerFenced,
            curriculum.CurriculumChanged,
        ),
        durables=(Durable("scheduler"),),
        calls=(STREAM_INFO, MESSAGE_GET, CONSUMER_LIST),
        also=(f"{subjects.FENCE}.*", *_lease("scheduler")),
        hears=(_HEARTBEATS,),
    ),
    Role(
        "env-runtime",
        events=(
            session.SessionStarted,
            session.SessionReleased,
            session.SessionEnded,
            step.SessionStepped,
            session.SessionResumed,
            tool.ToolCalled,
            anchor.AnchorCaptured,
            worker.WorkerHeartbeat,
        ),
        calls=(STREAM_INFO, MESSAGE_GET),
        names_consumers=True,
    ),
    Role(
        "reward",
        events=(
            reward.RewardScored,
            reward.RewardDeferred,
            reward.RewardMissing,
            reward.RewardRescored,
            service.ServiceModeChanged,
        ),
        durables=(
            Durable("reward", subjects.every(step.SessionStepped.event_name())),
            Durable("rescore", subjects.every(reward.RewardRescoreRequested.event_name())),
        ),
        also=_bucket(SERVICES_BUCKET),
    ),
    Role(
        "tool",
        events=(tool.ToolBegun, tool.ToolRetried, tool.ToolReturned, tool.ToolFailed),
        durables=(Durable("tool", subjects.every(tool.ToolCalled.event_name())),),
        calls=(STREAM_INFO, MESSAGE_GET),
        also=_bucket(TOOLS_BUCKET),
        hears=(subjects.every(session.SessionEnded.event_name()),),
    ),
    Role(
        "anchor-sync",
        events=(anchor.AnchorStored, anchor.AnchorLost),
        durables=(Durable("anchor-sync", subjects.every(anchor.AnchorCaptured.event_name())),),
    ),
    Role(
        "evaluator",
        events=(evaluation.PolicySanityChecked,),
        durables=(Durable("evaluator", subjects.every(session.SessionEnded.event_name())),),
    ),
    Role(
        "client",
        events=(
            spec.SpecRegistered,
            spec.PolicyPublished,
            service.ServiceDeclared,
            session.SessionRequested,
            session.SessionCancelRequested,
            reward.RewardRescoreRequested,
        ),
        calls=(
            *("INFO", STREAM_INFO, MESSAGE_GET, CONSUMER_LIST, f"CONSUMER.INFO.{_STREAM}.*"),
            *_reading(SERVICES_BUCKET),
        ),
        hears=(f"{subjects.ROOT}.{_ANYTHING}",),
        inbox="_INBOX",  # what every client library uses unless it is told otherwise
    ),
)
"""Every role. Each event of the catalogue is in at least one row."""

CLIENT = "client"
_BY_NAME = {role.name: role for role in ROLES}
_BY_USER = {role.user: role for role in ROLES}


def role_of_service(name: str) -> Role:
    """The role of a service; a client's for whatever is none of ours."""
    return _BY_NAME.get(name, _BY_NAME[CLIENT])


def inbox_prefix(nats_url: str) -> str:
    """Under which the user of a URL may hear answers. A server of the user's own, with users of
    its own, gets what every client library uses."""
    role = _BY_USER.get(urlsplit(nats_url.partition(",")[0]).username or "")
    return (role or _BY_NAME[CLIENT]).inbox_prefix
