"""A server that is away is told once in a while, not at every try."""

from dsec.platform.bus.refusals import TOLD_AGAIN_S, Repeats


def test_the_same_warning_is_new_again_after_a_while_only() -> None:
    repeats = Repeats()
    assert repeats.is_new("refused", 0.0)
    assert not repeats.is_new("refused", TOLD_AGAIN_S - 1)
    assert repeats.is_new("refused", TOLD_AGAIN_S)
    assert repeats.is_new("another", TOLD_AGAIN_S + 1)
    assert repeats.is_new("refused", TOLD_AGAIN_S + 2)
