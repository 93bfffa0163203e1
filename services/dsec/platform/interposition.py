"""What stands between user code and the process: the session's clock and chance.

Torch's generator is global to the process, so it is swapped on the way in and out; that costs 3 us
and is done only for programs whose code uses torch.
"""

from __future__ import annotations

from dsec.platform.virtual_torch import torch_enter, torch_exit, uses_torch
from dsec.session import chance as chances
from dsec.session.chance import Chance
from dsec.session.code import CodeNamespace
from dsec.session.interposition import Interposition, PlainInterposition


class TorchInterposition:
    """Swaps torch's generator beside the session's chance."""

    def enter(self, chance: Chance) -> None:
        """See `Interposition`."""
        chances.activate(chance)
        torch_enter(chance)

    def exit(self, chance: Chance) -> None:
        """See `Interposition`."""
        torch_exit(chance)
        chances.deactivate()


_PLAIN = PlainInterposition()
_TORCH = TorchInterposition()


def interposition_of(*namespaces: CodeNamespace) -> Interposition:
    """The cheapest interposition that keeps sessions of this code apart.

    Scoring and verification must use the same.
    """
    return _TORCH if any(uses_torch(code) for code in namespaces) else _PLAIN
