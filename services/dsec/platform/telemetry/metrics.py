"""Every metric's name, unit and definition, in one place.

Who tells a metric is part of it, so that one which nobody collects says so instead of being absent.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Teller = Literal["command", "otlp"]
"""`dsec metrics` computes from the log when asked; services send over OTLP while they run."""


class Metric(NamedTuple):
    """A metric's name, unit (UCUM) and definition; `tellers` is empty where it is not collected."""

    name: str
    unit: str
    definition: str
    tellers: tuple[Teller, ...] = ("otlp",)


RUS = Metric("rus", "share", "seats in use over seats of the workers that are ready")
SSAL_P95 = Metric(
    "ssal_p95", "s", "95th percentile from a session's request to its start", ("command",)
)
SSAL = Metric("ssal", "s", "from the time in a session's id to its first start, as a histogram")
RSCR = Metric(
    "rscr",
    "share",
    "sessions whose rewards, computed anew from the recorded transitions, equal the recorded ones "
    "at every step",
    ("command",),
)
ANCHOR_MISS_RATE = Metric(
    "anchor_miss_rate", "share", "anchor loads that found no blob over loads", ("command",)
)
TOOL_FAILURE_RATE = Metric(
    "tool_failure_rate",
    "share",
    "tool calls that failed over those that were answered: of all sessions in the log; sent by "
    "each replica of the tool service, of its own since it started",
    ("command", "otlp"),
)
SESSION_HEARTBEAT_P95 = Metric(
    "session_heartbeat_p95",
    "s",
    "95th percentile of the age of the last heartbeat over live sessions",
    ("command", "otlp"),
)
RVS_SKEW = Metric("rvs_skew", "1", "skew of the reward variance over nodes", ())

NAMED = {
    metric.name: metric
    for metric in (
        RSCR,
        SESSION_HEARTBEAT_P95,
        RUS,
        SSAL_P95,
        ANCHOR_MISS_RATE,
        TOOL_FAILURE_RATE,
        RVS_SKEW,
    )
}
"""The metrics that users know by name."""

SESSIONS_QUEUED = Metric("dsec.sessions.queued", "{session}", "sessions that wait for a worker")
SESSIONS_PLACED = Metric("dsec.sessions.placed", "{session}", "sessions that a worker has")
SESSIONS_ENDED = Metric("dsec.sessions.ended", "{session}", "ends that the scheduler has seen")
WORKERS_READY = Metric("dsec.workers.ready", "{worker}", "workers that may be given sessions")
WORKERS_FENCED = Metric("dsec.workers.fenced", "{worker}", "workers that were given up")
TICKS = Metric("dsec.ticks", "{tick}", "ticks of a worker's lanes")
STEPS = Metric("dsec.steps", "{step}", "steps that a worker's sessions took")
SESSIONS_HOSTED = Metric("dsec.sessions.hosted", "{session}", "sessions that a worker steps")
WORKER_MEMORY = Metric("dsec.worker.memory", "By", "resident memory of a worker")
TICKS_REWARDED = Metric("dsec.ticks.rewarded", "{tick}", "ticks that a replica has answered")
REWARDS = Metric("dsec.rewards", "{reward}", "rewards that a replica has published")
REWARDS_DEFERRED = Metric(
    "dsec.rewards.deferred", "{reward}", "rewards that came later, since a service was slow"
)
REWARDS_MISSING = Metric("dsec.rewards.missing", "{reward}", "rewards that it declared missing")
TOOL_CALLS = Metric("dsec.tool.calls", "{call}", "tool calls that a replica has answered")
TOOL_CALLS_FAILED = Metric("dsec.tool.calls.failed", "{call}", "of them, those that failed")
TOOL_RETRIES = Metric("dsec.tool.retries", "{attempt}", "attempts that failed and were repeated")
ANCHORS_STORED = Metric("dsec.anchors.stored", "{anchor}", "anchors that a replica has stored")
ANCHORS_LOST = Metric("dsec.anchors.lost", "{anchor}", "anchors that it has found no blob of")
ANCHORS_LOADED = Metric(
    "dsec.anchors.loaded", "{anchor}", "sessions that came back from an anchor on this worker"
)
ANCHORS_MISSED = Metric(
    "dsec.anchors.missed", "{anchor}", "anchors that a session could not come back from"
)
DEAD_LETTERS = Metric("dsec.dead_letters", "{message}", "messages put aside for people")
COMMITS = Metric("dsec.commits", "{commit}", "batches that the recorder has committed")
MESSAGES_RECORDED = Metric("dsec.messages.recorded", "{message}", "messages in those batches")
ROWS_RECORDED = Metric("dsec.rows.recorded", "{row}", "rows in them, known ones included")
CONFLICTS = Metric("dsec.conflicts", "{row}", "facts that differ from the ones logged before")
SUPERSEDED = Metric("dsec.superseded", "{row}", "inputs and ends that came after another one")
PARKED = Metric("dsec.parked", "{message}", "messages of types that are not known yet")
RECORDER_LAG = Metric(
    "dsec.recorder.lag", "s", "from the stream to the commit, of the last message committed"
)
SPANS_LOST = Metric(
    "dsec.telemetry.spans.lost", "{span}", "spans of this process that no receiver has taken"
)

OPERATIONAL = (
    SSAL,
    SESSIONS_QUEUED,
    SESSIONS_PLACED,
    SESSIONS_ENDED,
    WORKERS_READY,
    WORKERS_FENCED,
    TICKS,
    STEPS,
    SESSIONS_HOSTED,
    WORKER_MEMORY,
    TICKS_REWARDED,
    REWARDS,
    REWARDS_DEFERRED,
    REWARDS_MISSING,
    TOOL_CALLS,
    TOOL_CALLS_FAILED,
    TOOL_RETRIES,
    ANCHORS_STORED,
    ANCHORS_LOST,
    ANCHORS_LOADED,
    ANCHORS_MISSED,
    DEAD_LETTERS,
    COMMITS,
    MESSAGES_RECORDED,
    ROWS_RECORDED,
    CONFLICTS,
    SUPERSEDED,
    PARKED,
    RECORDER_LAG,
    SPANS_LOST,
)
"""What operators look at. Rates are the receiver's to make: counters only grow."""
