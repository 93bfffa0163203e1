"""What an agent returns as `state_anchor`: that its session's state be captured now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dsec_contracts.anchor import ANCHOR_TAGS_MAX

OWN_TAGS_MAX = 3
"""That DSec puts before an agent's: why the anchor is taken."""
TAGS_MAX = ANCHOR_TAGS_MAX - OWN_TAGS_MAX
TAG_CHARS_MAX = 64


class _Whole:
    """Stands for the agent as it is, in place of a state that it gives itself."""

    def __repr__(self) -> str:
        return "WHOLE"


WHOLE: Final = _Whole()


@dataclass(frozen=True, slots=True)
class StateAnchor:
    """What `create_state_anchor` gives. `state` is `WHOLE` where the agent leaves it to DSec."""

    state: Any = WHOLE
    tags: tuple[str, ...] = ()


def state_anchor_of(given: Any) -> StateAnchor | None:
    """What a decision's `state_anchor` asks for: None or False for nothing, True for the agent as
    it is, anything else is the agent's state.

    Raises:
        ValueError: its tags are none.
    """
    if given is None or given is False:
        return None
    if given is True:
        return StateAnchor()
    if type(given) is not StateAnchor:
        return StateAnchor(given)
    # Read once: a class of the user's own may give others the next time.
    tags = tuple(given.tags)
    if len(tags) > TAGS_MAX:
        raise ValueError(f"{len(tags)} tags; an anchor takes {TAGS_MAX}")
    for tag in tags:
        if type(tag) is not str or not 0 < len(tag) <= TAG_CHARS_MAX or not tag.isprintable():
            raise ValueError(f"a tag is printable text of 1 to {TAG_CHARS_MAX} characters")
    return StateAnchor(given.state, tags)
