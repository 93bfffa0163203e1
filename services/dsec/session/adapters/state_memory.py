"""What a `StateProbe` remembers, so that a restored environment is read as the first one would be.

The bytes of a state depend on more than the state: how attributes were sorted when the probe was
made, and which large containers it read how long ago. An environment that comes back from an anchor
must give the very bytes that it would have given, so these travel with it.
"""

from __future__ import annotations

from typing import Any

from dsec.session.adapters.state import Layer, StateProbe

Memory = dict[str, Any]
"""Canonical values only."""


def memory_of(probe: StateProbe) -> Memory:
    """What a probe remembers."""
    return {"count": probe.attributes_count, "layers": [_of_layer(la) for la in probe.layers]}


def _of_layer(layer: Layer) -> dict[str, Any]:
    attributes = layer.attributes
    return {
        "plain": list(layer.plain),
        "slow": list(layer.slow),
        "generators": list(layer.generators),
        # An array whose type changed since is one that the next reading sorts anew.
        "arrays": [
            [name, getattr(attributes.get(name), "dtype", None) is dtype]
            for name, dtype in layer.arrays
        ],
        "reads": layer.reads,
        "large": {
            name: [read, has_objects]
            for name, (value, read, has_objects) in layer.large.items()
            if attributes.get(name) is value
        },
    }


def recall(probe: StateProbe, memory: Memory) -> None:
    """Give a fresh probe what another one remembered, one reading ago: its first reading is the
    other one's last, and what it gives can be compared.

    Raises:
        ValueError, KeyError, TypeError: the environment is made of other layers.
    """
    for layer, told in zip(probe.layers, memory["layers"], strict=True):
        layer.plain, layer.slow = list(told["plain"]), list(told["slow"])
        layer.generators = list(told["generators"])
        layer.arrays = [
            (name, layer.attributes[name].dtype if same else None) for name, same in told["arrays"]
        ]
        layer.reads = max(0, told["reads"] - 1)
        layer.large = {
            name: (layer.attributes[name], bytes(read), bool(has_objects))
            for name, (read, has_objects) in told["large"].items()
        }
    probe.bind()
    probe.attributes_count = memory["count"]
