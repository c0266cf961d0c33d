"""A teacher to start from: rational, unless a test says otherwise."""

from __future__ import annotations

from functools import partial

from oracles import links
from oracles.teacher import Teacher

RATIONAL = partial(
    Teacher,
    link=links.logistic,
    tau=0.0,
    gamma=1.0,
    eps_mistake=0.0,
    eps_skip=0.0,
    eps_equal=0.0,
    tie="equal",
    bpref_compat=False,
)
