"""What coupons were worth: gross merchandise value, margin and retention, from three services."""

from __future__ import annotations

from typing import Any

import dsec

WEIGHTS = {"gmv": 0.5, "margin": 0.3, "retention": 0.2, "flagged": 0.0, "good": 0.0, "hour": 0.0}
"""The last three weigh nothing: they are there for whoever asks the log."""


@dsec.reward(weights=WEIGHTS, services=["inventory", "price", "risk"])
async def sales(t: Any, services: Any) -> dict[str, float]:
    """The reward of one customer."""
    sold = t.info
    where = {"segment": sold["segment"], "hour": sold["hour"]}
    stock = (await services["inventory"].get("/stock", params=where)).json()
    basket = round(sold["basket"] * stock["share"], 6)
    offer = {**where, "coupons": sold["coupons"], "basket": basket}
    quote = (await services["price"].post("/quote", json=offer)).json()
    customer = {**where, "loyalty": sold["loyalty"], "good": sold["good"]}
    risk = (await services["risk"].post("/assess", json=customer)).json()
    lost = 0.5 if risk["flagged"] else 0.0
    return {
        "gmv": quote["gmv"],
        "margin": quote["margin"],
        "retention": sold["loyalty"] * (1 - lost) + 0.1 * bool(sold["coupons"]),
        "flagged": float(risk["flagged"]),
        "good": float(sold["good"]),
        "hour": float(sold["hour"]),
    }
