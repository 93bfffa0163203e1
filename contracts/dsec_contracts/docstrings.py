"""What is written below a field is its description in the schema.

pydantic can read the source of every model for this when the class is made
(`use_attribute_docstrings`): a third of what importing the events costs, in every process, and only
whoever publishes schemas wants it. So it is read when a schema is made.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel


def describe(model: type[BaseModel], schema: dict[str, Any]) -> None:
    """Put what is written below each field into the model's JSON Schema, in place."""
    for name, field in schema.get("properties", {}).items():
        owner = next(
            base for base in model.__mro__ if name in vars(base).get("__annotations__", {})
        )
        if sentence := below_fields(owner).get(name):
            field["description"] = sentence


@cache
def below_fields(owner: type) -> dict[str, str]:
    """The string literals that follow annotated names in the body of a class, by name."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
