"""Verification finds any single changed fact, of outputs and of rewards, and names it."""

import math
from datetime import UTC, datetime

import pytest
from tests.replay.conftest import SESSION_ID

from dsec.replay.verify import _Rewards, request_of, rscr, verify
from dsec.reward.reexecution import answered, read_recorded, recorded
from dsec.reward.services import Request, Response
from dsec.session.io import SessionConfig
from dsec.session.local import run_in_memory
from dsec.session.observations import reference
from dsec.session.program import session_config
from dsec_contracts.canonical import decode, encode
from dsec_contracts.session import RequestFact
from dsec_contracts.step import STEP_FIELDS

CONFIG = SessionConfig(7, 40)
SOUND = "def reward(t, services):\n    return t.env_reward\n"
FAILING = "def reward(t, services):\n    assert t.step % 3\n    return t.env_reward\n"


def check(made, rows, **options):
    return verify(rows, made.program, CONFIG, made.scorer, **options)


def test_a_true_log_verifies_to_its_end_and_to_any_cut(cartpole, rows):
    verdict = check(cartpole, rows)
    assert verdict.ok
    assert verdict.reward_ok
    assert verdict.complete
    assert (verdict.steps, verdict.rewards_compared) == (40, 40)
    for cut in (0, 1, 2, 3, 40, len(rows) - 1):
        verdict = check(cartpole, rows[:cut])
        assert verdict.ok
        assert not verdict.complete


def other(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return ["other"]


@pytest.mark.parametrize("name", STEP_FIELDS)
def test_a_changed_fact_of_a_step_is_named(cartpole, rows, name):
    n = STEP_FIELDS.index(name)

    def changed(row):
        fact = decode(row.fact)
        fact[n] = other(fact[n])
        return row._replace(fact=encode(fact))

    false = [changed(r) if r.key == "step:21" else r for r in rows]
    verdict = check(cartpole, false)
    assert not verdict.ok
    assert (verdict.first_divergence.step, verdict.first_divergence.field) == (21, name)
    assert verdict.steps == 40


@pytest.mark.parametrize(
    ("column", "value"),
    [("episode", 9), ("value", 3.5), ("value", None), ("terminated", None), ("truncated", True)],
)
def test_a_column_that_does_not_say_what_its_fact_says(cartpole, rows, column, value):
    false = [r._replace(**{column: value}) if r.key == "step:21" else r for r in rows]
    first = check(cartpole, false).first_divergence
    assert (first.step, first.field) == (21, f"column {column}")


@pytest.mark.parametrize(
    ("n", "value", "field"),
    [
        (2, 0.123, "reward"),
        (2, math.nan, "reward"),
        (3, {"moved": [0.5, 1.0]}, "reward components"),
        (4, b"\0" * 16, "reward cause"),
        (1, 2, "reward"),
        (0, 22, "reward"),
    ],
)
def test_a_changed_fact_of_a_reward_is_named(cartpole, rows, n, value, field):
    def changed(row):
        fact = decode(row.fact)
        fact[n] = value
        return row._replace(fact=encode(fact), value=fact[2])

    false = [changed(r) if r.key == "reward:21.1" else r for r in rows]
    verdict = check(cartpole, false)
    assert not verdict.ok
    assert verdict.reward_ok is False
    assert (verdict.first_divergence.step, verdict.first_divergence.field) == (21, field)


def test_a_changed_value_column_of_a_reward_is_named(cartpole, rows):
    false = [r._replace(value=-1.0) if r.key == "reward:21.1" else r for r in rows]
    first = check(cartpole, false).first_divergence
    assert (first.step, first.field) == (21, "column value of the reward")


def test_a_lost_reward_is_found(cartpole, rows):
    verdict = check(cartpole, [r for r in rows if r.key != "reward:21.1"])
    assert (verdict.first_divergence.step, verdict.first_divergence.field) == (22, "inputs")


def test_a_gap_and_a_broken_fact_are_told_and_not_raised(cartpole, rows):
    verdict = check(cartpole, [r for r in rows if r.key != "step:21"])
    assert (verdict.first_divergence.step, verdict.first_divergence.field) == (21, "recorded")
    verdict = check(cartpole, [r._replace(fact=b"") if r.key == "ended" else r for r in rows])
    assert "ended" in verdict.first_divergence.expected


def test_another_reward_function_has_other_rewards_and_the_same_steps(made, cartpole, rows):
    env = made()
    verdict = verify(rows, cartpole.program, CONFIG, env.scorer)
    assert verdict.reward_ok is False
    assert verdict.first_divergence.step == 0
    verdict = verify(rows, cartpole.program, CONFIG, None)
    assert verdict.ok
    assert verdict.reward_ok is None


def test_a_reward_that_failed_must_fail_again(made):
    failing = made(reward=FAILING)
    rows = failing.rows()
    assert check(failing, rows).ok
    sound = made(reward=SOUND)
    verdict = verify(rows, failing.program, CONFIG, sound.scorer)
    assert verdict.reward_ok is False
    assert (verdict.first_divergence.step, verdict.first_divergence.field) == (0, "reward")
    assert verdict.first_divergence.expected == "none: reward_raised"


def test_a_reward_that_circumstances_kept_away_is_left_out(made):
    failing = made(reward=FAILING)
    sound = made(reward=SOUND)

    class Away:
        def score(self, *arguments):
            try:
                return failing.scorer.score(*arguments)
            except Exception as error:
                error.code = "reward_deadline"
                raise

    failing_rows = type(failing)(failing.program, Away()).rows()
    verdict = verify(failing_rows, failing.program, CONFIG, sound.scorer)
    assert verdict.ok
    assert verdict.reward_ok
    assert verdict.rewards_compared == 26


def test_a_scored_reward_that_now_fails_is_unequal(made):
    sound = made(reward=SOUND)
    failing = made(reward=FAILING)
    verdict = verify(sound.rows(), sound.program, CONFIG, failing.scorer)
    assert verdict.reward_ok is False
    assert "reward_raised" in verdict.first_divergence.actual


def test_observations_in_the_object_store_are_fetched(cartpole, rows):
    blobs = {}

    def stored(data):
        key = f"blob{len(blobs)}"
        blobs[key] = data
        return reference(key, len(data))

    def away(row):
        return row._replace(
            observation=row.observation and stored(row.observation),
            reset_observation=row.reset_observation and stored(row.reset_observation),
        )

    referring = [away(r) for r in rows]
    assert check(cartpole, referring, get_blob=blobs.__getitem__).ok
    assert check(cartpole, referring).reward_ok is False

    del blobs[decode(referring[-3].observation)["$blob"]]
    verdict = check(cartpole, referring, get_blob=blobs.__getitem__)
    assert (verdict.first_divergence.step, verdict.first_divergence.field) == (39, "reward")
    assert "an observation is lost" in verdict.first_divergence.actual


def test_rscr_is_the_share_of_sessions(cartpole, rows):
    good = check(cartpole, rows)
    false = [r._replace(value=-1.0) if r.key == "reward:21.1" else r for r in rows]
    bad = check(cartpole, false)
    unknown = verify(rows, cartpole.program, CONFIG, None)
    assert rscr([good, bad, good, good, unknown]) == 0.75
    assert rscr([unknown]) is None


def test_a_config_is_made_from_the_logged_request(cartpole):
    session_id = "0192f0c1-2345-7abc-8def-0123456789ab"
    request = RequestFact(
        session_id=session_id,
        agent_spec="a" * 64,
        env_spec="b" * 64,
        reward_fn_hash="c" * 64,
        seed=2**63 - 1,
        max_steps=12,
        creation_timestamp=datetime(2026, 1, 1, tzinfo=UTC),
        agent_stream=3,
        labels={"a": "ü\0"},
    )
    rows = cartpole.rows(request=request, max_steps=3)
    assert request_of(rows) == request
    config = session_config(request, cartpole.program)
    assert (config.seed, config.max_steps, config.agent_stream) == (2**63 - 1, 12, 3)
    assert request_of(rows[1:]) is None


ASKING = """
import dsec

@dsec.reward(services=["stock"])
async def reward(t, services):
    found = await services["stock"].get("/left", params={"step": t.step})
    return {"left": found.json(), "alive": t.env_reward}
"""


class Answering:
    """A scorer whose function is answered, and the answers that are in the log then."""

    def __init__(self, scorer):
        self.scorer = scorer
        self.recorded = {}

    def score(self, fact, before, after):
        step = decode(fact)[0]
        response = Response(200, {}, str(step * 0.5).encode())
        asked = Request("stock", "GET", "/left", (("step", str(step)),), None)
        self.recorded[step] = recorded(answered([asked], [response], []))
        return self.scorer.score(fact, before, after, self.recorded[step])


def with_services(made):
    asking = made(reward=ASKING)
    answering = Answering(asking.scorer)
    rows = run_in_memory(asking.program, CONFIG, SESSION_ID, answering)
    rewards = {f"reward:{step}.1": data for step, data in answering.recorded.items()}
    return asking, [r._replace(extras=rewards.get(r.key, r.extras)) for r in rows]


def test_rewards_are_computed_anew_from_what_services_answered(made):
    asking, rows = with_services(made)
    verdict = check(asking, rows)
    assert verdict.ok
    assert verdict.rewards_compared == 40
    assert rscr([verdict]) == 1.0
    stored = {"k": next(r.extras for r in rows if r.key == "reward:9.1")}
    kept = reference("k", len(stored["k"]))
    moved = [r._replace(extras=kept) if r.key == "reward:9.1" else r for r in rows]
    assert check(asking, moved, get_blob=stored.__getitem__).ok
    lost = check(asking, moved, get_blob={}.__getitem__).first_divergence
    assert (lost.step, lost.field) == (9, "reward")
    assert "what services answered is lost" in lost.actual


@pytest.mark.parametrize(
    ("change", "told"),
    [(lambda _: None, "service_unanswered"), (lambda data: data[:-3] + b"9.9", None)],
)
def test_another_response_than_the_recorded_one_is_found(made, change, told):
    asking, rows = with_services(made)
    false = [r._replace(extras=change(r.extras)) if r.key == "reward:21.1" else r for r in rows]
    verdict = check(asking, false)
    assert not verdict.reward_ok
    assert verdict.first_divergence.step == 21
    if told:
        assert told in verdict.first_divergence.actual


def test_a_reward_that_went_missing_after_an_answer_is_missed_again(made):
    _, rows = with_services(made)
    raising = made(reward=ASKING.replace('"left": found.json()', '"left": 1 / found.json()'))
    scored = next(row for row in rows if row.key == "reward:0.1")  # 0 are left: it raises
    notice = scored._replace(
        kind="reward.missing",
        key="reward_missing:0",
        value=None,
        fact=encode({"session_id": str(SESSION_ID), "step": 0, "code": "reward_raised"}),
    )
    told = [notice if row is scored else row for row in rows if row.step in (None, 0)]

    def rewards(changed):
        found = _Rewards(changed, None)
        found.compare(raising.scorer)
        return found.compared, found.divergence

    assert rewards(told) == (1, None)
    unanswered = [row._replace(extras=None) if row is notice else row for row in told]
    assert rewards(unanswered) == (0, None), "of an earlier version, which kept none"
    more = recorded([one._replace(body=b"2.0") for one in read_recorded(notice.extras)])
    other = [row._replace(extras=more) if row is notice else row for row in told]
    assert rewards(other)[1].field == "reward"
