"""`dsec replay`, `verify` and `diff`: a session from its log, re-executed, beside another one."""

from __future__ import annotations

from typing import Any

import click

from dsec.cli.answer import (
    Refused,
    answers,
    exit_with,
    json_option,
    out,
    progress,
    run_async,
    say_json,
)
from dsec.cli.failures import reason
from dsec.cli.find import find_session
from dsec.cli.tables import print_fields
from dsec.client.client import Client
from dsec.client.plain import plain
from dsec.client.queries import Summary
from dsec.client.verification import SESSION_DEADLINE_S, verify_sessions
from dsec.replay.diff import Difference, LogSource
from dsec.replay.diff import diff as diff_sessions
from dsec.replay.fold import SessionState, StepNotRecorded, fold, fold_at
from dsec.session.log_row import RecordedGap
from dsec.session.observations import resolve
from dsec_contracts.canonical import decode


@click.command()
@click.argument("session_id")
@click.option("--at", type=click.IntRange(0), metavar="STEP", help="The state right after a step.")
@json_option
@answers
def replay(session_id: str, at: int | None, as_json: bool) -> None:
    """Show the recorded state of a session, folded from its log. Runs no user code.

    Exits 1 where a recorded hash is not that of the recorded facts.
    """
    told = run_async(_replay(session_id, at))
    if as_json:
        say_json(told)
    else:
        print_fields(told)
    exit_with(told["intact"])


async def _replay(named: str, at: int | None) -> dict[str, Any]:
    async with Client(name="cli") as client:
        session_id = await find_session(client.queries, named)
        rows = await (await client.log()).rows(session_id)
        try:
            state = fold(rows) if at is None else fold_at(rows, at)
        except StepNotRecorded as error:
            raise Refused(f"session {session_id}: {error}") from error
        except RecordedGap as error:
            raise Refused(f"the log of session {session_id} is damaged: {error}") from error
        return {"session_id": str(session_id), **_state_json(state, client)}


def _state_json(state: SessionState, client: Client) -> dict[str, Any]:
    observation = None
    if state.observation:
        data = state.observation
        data = resolve(data, client.objects().get) if client.object_store_url else data
        observation = plain(decode(data))
    return {
        "status": state.status,
        "code": state.code,
        "steps": state.steps,
        "reward_total": state.reward_total,
        "chain_hash": state.chain_hash,
        "episodes": state.episodes,
        "attempts": state.attempts,
        "rewards_missing": state.rewards_missing,
        "rewards_deferred": [
            {"step": one.step, "code": one.code, "delivered_before_step": one.delivered_before}
            for one in state.deferred
        ],
        "returns": state.returns,
        "observation": observation,
        "intact": state.intact,
        "fault": None
        if state.fault is None
        else {"step": state.fault.step, "field": state.fault.field},
    }


@click.command()
@click.argument("session_ids", nargs=-1, required=True)
@click.option(
    "--deadline-s",
    type=click.FloatRange(min=0, min_open=True),
    default=SESSION_DEADLINE_S,
    show_default=True,
    help="What re-executing one session may take.",
)
@json_option
@answers
def verify(session_ids: tuple[str, ...], deadline_s: float, as_json: bool) -> None:
    """Re-execute sessions under their recorded inputs; name the first divergence. Exits 1 on one.

    Their rewards are computed anew as well. With --json, one id gives an object, several a list.
    """
    verdicts = run_async(_verify(session_ids, deadline_s))
    if as_json:
        say_json(verdicts if len(verdicts) > 1 else verdicts[0])
    else:
        for verdict in verdicts:
            out.print(verdict_line(verdict), soft_wrap=True, markup=False, highlight=False)
    exit_with(all(verdict["ok"] for verdict in verdicts))


async def _verify(named: tuple[str, ...], deadline_s: float) -> list[dict[str, Any]]:
    async with Client(name="cli") as client:
        ids = [await find_session(client.queries, name) for name in named]
        with progress() as display:
            task = display.add_task("verified", total=len(ids))
            return await verify_sessions(
                client,
                ids,
                lambda done: display.update(task, completed=done),
                deadline_s=deadline_s,
            )


def verdict_line(verdict: dict[str, Any]) -> str:
    """A verdict as one line."""
    session_id, steps = verdict["session_id"], verdict["steps"]
    if verdict["error"]:
        return f"{session_id}  cannot be verified: {verdict['error']}"
    ended = verdict["ended"]
    if verdict["ok"] and verdict["determinism"] == "D0":
        rest = "" if verdict["complete"] else ", so far: it has not ended"
        return (
            f"{session_id}  its record of {steps} {'step' if steps == 1 else 'steps'} is whole and "
            f"its rewards are the same; not executed again (D0){rest}"
        )
    if verdict["ok"] and ended is not None and ended["status"] != "completed":
        why = reason(ended["status"], ended["code"], ended["message"])
        what = f"{_compared(steps)} the same up to" if steps else "it took no step before"
        return f"{session_id}  verified: {what} its recorded end, which is: {why}"
    if verdict["ok"]:
        rest = "" if verdict["complete"] else ", so far: it has not ended"
        return f"{session_id}  verified: {_compared(steps)} the same{rest}"
    first = verdict["first_divergence"]
    return (
        f"{session_id}  DIVERGED {place(first)}, {first['field']}: "
        f"the log has {first['expected']}, re-executed it is {first['actual']}"
    )


def _compared(steps: int) -> str:
    return f"{steps} {'step' if steps == 1 else 'steps'} and their rewards are"


@click.command()
@click.argument("a")
@click.argument("b")
@json_option
@answers
def diff(a: str, b: str, as_json: bool) -> None:
    """Find the first difference of two sessions, by bisection. Exits 1 if they differ."""
    found, asked = run_async(_diff(a, b))
    told = difference_json(found)
    if as_json:
        say_json(told)
    elif found.first_difference is None:
        click.echo(f"Equal at every step ({found.rows_read} rows read).")
    else:
        first = told["first_difference"]
        click.echo(f"They part {place(first)}, {first['field']}:")
        click.echo(f"  a: {first['a']}\n  b: {first['b']}")
        if asked:
            click.echo(f"They were requested with a different {asked}.")
    exit_with(found.equal)


async def _diff(a: str, b: str) -> tuple[Difference, str]:
    async with Client(name="cli") as client:
        log = await client.log()
        ids = [await find_session(client.queries, name) for name in (a, b)]
        one, two = (LogSource(log, session_id) for session_id in ids)
        summaries = {s.session_id: s for s in await client.queries.summaries(ids)}
        asked = asked_differently(*(summaries[session_id] for session_id in ids))
        try:
            return await diff_sessions(one, two), asked
        except RecordedGap as error:
            raise Refused(f"one of the logs is damaged: {error}") from error


def asked_differently(a: Summary, b: Summary) -> str:
    """In what the requests of two sessions differ, as `seed (7, 8) and agent`; empty: in nothing
    that a summary shows."""
    differing = [f"seed ({a.seed}, {b.seed})"] if a.seed != b.seed else []
    differing += [kind for kind in a.specs if a.specs[kind] != b.specs.get(kind)]
    return " and ".join(differing)


def place(first: dict[str, Any]) -> str:
    """Where a difference is: the reset is before step 0, the end behind the last."""
    if first["step"] is not None:
        return f"at step {first['step']}"
    return "at the first reset" if first["field"].startswith("reset.") else "at the start or end"


def difference_json(found: Difference) -> dict[str, Any]:
    """The documented keys of `diff`."""
    first = found.first_difference
    return {
        "equal": found.equal,
        "rows_read": found.rows_read,
        "first_difference": None
        if first is None
        else {
            "step": first.step,
            "field": first.field,
            "a": plain(first.a),
            "b": plain(first.b),
        },
    }
