import numpy as np

from oracles.speed import seconds


def test_the_benchmark_asks_what_it_says():
    asked = []

    class Listener:
        def compare(self, first, second, *, mean_return, episode_steps):
            asked.append((first.shape, second.shape, mean_return, episode_steps))

    reading, comparing = seconds(Listener(), pairs=7, steps=5, repeats=3, rng=np.random.default_rng(0))
    assert asked == [((7, 5), (7, 5), 2.5, 5)] * 3
    assert reading > 0
    assert comparing > 0
