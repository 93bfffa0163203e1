"""A row of the log as the input that it is to its session, or the output that it was."""

from __future__ import annotations

from collections.abc import Callable

from dsec.session import log_row
from dsec.session.io import (
    Call,
    Called,
    Ended,
    Input,
    cancel_input,
    curriculum_input,
    deferred_input,
    failure_content,
    missing_input,
    result_input,
    reward_input,
)
from dsec.session.log_row import Row, circumstance_map, ended_fact, fact_bytes, fact_map
from dsec.session.stored_results import StoredResult
from dsec_contracts import keys
from dsec_contracts.reward import CAUSE_BYTES

GetBlob = Callable[[str], bytes]
"""Gives the bytes of results that lie in the object store."""


def ended_of(row: Row) -> Ended:
    """The end that a row tells of.

    Raises:
        ValueError, KeyError: the fact is not that of an end.
    """
    fact = ended_fact(row)
    return Ended(
        fact.status,
        fact.code,
        fact.steps,
        fact.episodes,
        fact.inputs,
        fact.chain,
        str(circumstance_map(row).get("message", "")),
    )


def turn_of(row: Row) -> Called:
    """The tool calls that a row tells of.

    Raises:
        ValueError, KeyError: the fact is not that of tool calls.
    """
    fact = fact_map(row)
    functions = [(one["id"], one["function"]) for one in fact["calls"]]
    calls = tuple(Call(id_, told["name"], told["arguments"]) for id_, told in functions)
    inputs, turn_hash = fact_bytes(fact, "inputs"), fact_bytes(fact, "turn_hash")
    return Called(int(fact["step"]), int(fact["turn"]), inputs, calls, turn_hash, b"")


def _result_of(row: Row, get_blob: GetBlob | None) -> Input:
    fact = fact_map(row)
    ordinal = keys.call_ordinal(fact["step"], fact["turn"], fact["index"])
    turn_hash = fact_bytes(fact, "turn_hash")
    if row.kind == log_row.TOOL_RETURNED:
        if (blob := fact.get("blob")) is not None:
            if get_blob is None:
                raise ValueError(f"its result, blob {blob}, is in an object store: name the store")
            return StoredResult(ordinal, blob, turn_hash).given(get_blob(blob))
        return result_input(ordinal, "", fact_bytes(fact, "content"), turn_hash)
    content = failure_content(fact["message"], bool(fact["retryable"]))
    return result_input(ordinal, fact["code"], content, turn_hash)


def input_of(row: Row, get_blob: GetBlob | None = None) -> Input | None:
    """The input that a row is to its session, or None. Later revisions of a reward are none.

    Raises:
        ValueError, KeyError: the fact is not what its kind says.
    """
    if row.kind == log_row.REWARD_SCORED:
        fact, step = bytes(row.fact), row.step
        assert step is not None
        if row.key != keys.reward(step):
            return None
        assert row.value is not None
        return reward_input(step, row.value, fact, fact[-CAUSE_BYTES:])
    if row.kind == log_row.REWARD_MISSING:
        notice, told = fact_map(row), circumstance_map(row)
        return missing_input(
            notice["step"],
            notice["code"],
            bool(notice.get("fatal", False)),
            str(told.get("message", "")),
            fact_bytes(notice, "cause"),
        )
    if row.kind == log_row.REWARD_DEFERRED:
        notice = fact_map(row)
        return deferred_input(notice["step"], notice["code"], fact_bytes(notice, "cause"))
    if row.kind in (log_row.TOOL_RETURNED, log_row.TOOL_FAILED):
        return _result_of(row, get_blob)
    if row.kind == log_row.CURRICULUM_CHANGED:
        change = fact_map(row)
        return curriculum_input(int(change["n"]), int(change["level"]))
    if row.kind == log_row.CANCEL_REQUESTED:
        told = circumstance_map(row)
        return cancel_input(str(told.get("code", "cancelled")), str(told.get("reason") or ""))
    return None
