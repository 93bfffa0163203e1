"""How checks are run: one that breaks or hangs costs its own answer and nothing else."""

from __future__ import annotations

import threading
from time import monotonic

from dsec.doctor.finding import Check, Finding, Unseen, examine
from dsec.doctor.hiding import Hidden, shown

NOTHING = Hidden([])


def fine() -> Finding:
    """A check that is content."""
    return Finding("ok", "All is well.")


def test_a_check_that_raises_is_a_failure_of_its_own() -> None:
    def broken() -> Finding:
        raise KeyError("surprise")

    first, second = examine([Check("broken", broken), Check("fine", fine)], NOTHING)
    assert (first.name, first.status) == ("broken", "fail")
    assert "surprise" in first.sentence
    assert (second.name, second.status) == ("fine", "ok")


def test_a_check_that_hangs_ends_at_its_deadline() -> None:
    never = threading.Event()

    def hangs() -> Finding:
        never.wait(60)
        return fine()

    began = monotonic()
    first, second = examine([Check("hangs", hangs, 0.2), Check("fine", fine)], NOTHING)
    never.set()
    assert monotonic() - began < 5
    assert (first.status, first.seconds) == ("fail", 0.2)
    assert "No answer within" in first.sentence
    assert second.status == "ok"


def test_what_cannot_be_seen_is_absent() -> None:
    def blind() -> Finding:
        raise Unseen("There is no such server.")

    (result,) = examine([Check("blind", blind)], NOTHING)
    assert (result.status, result.sentence) == ("absent", "There is no such server.")
    assert set(result.as_json()) == {"name", "status", "sentence", "advice", "facts", "seconds"}


def test_errors_are_told_without_secrets() -> None:
    url = "postgresql://me:s3cr%40t@host:5432/db?sslpassword=other"

    def careless() -> Finding:
        raise RuntimeError(f"cannot connect to {url} with s3cr@t and other")

    (result,) = examine([Check("careless", careless)], Hidden([url]))
    for secret in ("s3cr%40t", "s3cr@t", "other"):
        assert secret not in result.sentence
    assert "host:5432" in result.sentence


def test_urls_are_shown_without_what_is_secret() -> None:
    assert shown("nats://dsec:p_w@host:4222") == "nats://host:4222"
    assert shown("nats://t0ken@a:1,nats://t0ken@b:2") == "nats://a:1,nats://b:2"
    assert shown("u:p@host:4222") == "host:4222"
    assert shown("postgresql://u:p@h/d?password=x#y") == "postgresql://h/d"
    assert shown("file:///srv/objects") == "file:///srv/objects"


def test_a_token_alone_is_a_secret() -> None:
    assert Hidden(["nats://t0ken@a:1"]).hide("bad token t0ken") == "bad token ***"
