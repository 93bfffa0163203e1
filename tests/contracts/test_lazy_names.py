"""The package's names: those that a type checker is told are those that there are."""

from __future__ import annotations

import ast
import importlib
import inspect

import dsec_contracts


def test_type_checkers_are_told_of_the_names_that_there_are() -> None:
    tree = ast.parse(inspect.getsource(dsec_contracts))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    told = {
        alias.asname: node.module
        for node in (node for block in blocks for node in block.body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places = {name: f"dsec_contracts.{place}" for name, place in dsec_contracts._PLACES.items()}
    assert told == places
    assert len(dsec_contracts.__all__) == len(set(dsec_contracts.__all__)) == len(told)


def test_every_name_is_that_of_its_module() -> None:
    for name, place in dsec_contracts._PLACES.items():
        module = importlib.import_module(f"dsec_contracts.{place}")
        assert getattr(dsec_contracts, name) is getattr(module, name)
    assert set(dsec_contracts.__all__) <= set(dir(dsec_contracts))
