from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from native_tasks import NATIVE

from pbrl.policy import GaussianPolicy
from pbrl.simulation.simulator import Simulator

settings.register_profile("pbrl", deadline=None)  # no test asserts a time
settings.load_profile("pbrl")
torch.set_num_threads(1)  # tests run on all cores already


@pytest.fixture(params=NATIVE)
def native_task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_policy() -> Callable[..., GaussianPolicy]:
    def make(simulator: Simulator, hidden: tuple[int, ...] = (32, 32), **changes: Any) -> GaussianPolicy:
        settings = {"hidden_gain": 2**0.5, "output_gain": 1.0, "initial_log_std": -0.5, **changes}
        return GaussianPolicy(simulator.obs_size, simulator.act_size, hidden=hidden, **settings)

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
