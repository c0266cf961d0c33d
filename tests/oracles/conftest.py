import numpy as np
import pytest
from teachers import RATIONAL

from pbrl.run.preference_log import PreferenceLog
from pbrl.types import Question


@pytest.fixture(scope="session")
def recorded_log(tmp_path_factory):
    """A log of two questions, for one expert and for four: its folder, the rewards, and the pairs asked."""
    folder = tmp_path_factory.mktemp("recorded")
    rng = np.random.default_rng(8)
    rewards = rng.normal(1.0, 1.0, size=(16, 10))
    first, second = rng.integers(16, size=(2, 40))
    rng = np.random.default_rng(9)
    teacher = RATIONAL(tau=1.0, gamma=0.9, eps_mistake=0.1, eps_skip=0.8, eps_equal=0.1, rng=rng)
    log = PreferenceLog(folder)
    for iteration, experts in enumerate((1, 4)):
        question = {"mean_return": 10.0, "episode_steps": 10, "experts": experts}
        log.append(
            teacher.compare(Question.about_rewards(rewards[first], rewards[second], **question)),
            iteration=iteration,
            first=first,
            second=second,
            first_step=0,
            second_step=0,
            clip_steps=10,
            **question,
        )
    log.close()
    return folder, rewards, first, second
