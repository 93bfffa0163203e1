"""A reward with two named components: stay upright, stay near the middle."""

import dsec

ANGLE_MAX_RAD = 0.2095
POSITION_MAX = 2.4


@dsec.reward(weights={"upright": 0.8, "centred": 0.2}, per="step")
def balance(t: dsec.Transition, services: object) -> dict[str, float]:
    position, _, angle, _ = (float(x) for x in t.next_observation)
    return {
        "upright": 1.0 - abs(angle) / ANGLE_MAX_RAD,
        "centred": 1.0 - abs(position) / POSITION_MAX,
    }
