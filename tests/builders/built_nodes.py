"""Nodes as they are put together, of which nothing runs yet."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from cluster.local_tokenizer import local_tokenizer
from ranvier_py.config.config_loader import config_of
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.node import make_node, parts_of
from ranvier_py.node.part import Node, Part
from tests.node.node_lab import PLACES

KEY = bytes(32)


def built(
    clustering: ClusterParts | None = None, more: Callable[[Node], list[Part]] = lambda _: [], **settings: Any
) -> Node:
    """A node with all its parts, `more` of them first."""
    config = config_of(**PLACES, **settings)
    tokenizer = local_tokenizer(config, KEY)
    node, inbox = make_node(config, tokenizer, Random(1), KEY)
    node.assemble([*more(node), *parts_of(node, tokenizer, inbox, clustering)])
    return node
