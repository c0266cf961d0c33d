"""Workers: results in order, and torch's own threads as they were."""

import pytest
import torch

from pbrl.threads import workers


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_workers_take_the_place_of_torchs_threads():
    with workers() as pool:
        assert pool._max_workers == 3
        assert torch.get_num_threads() == 1
        assert set(pool.map(lambda _: torch.get_num_threads(), range(9))) == {1}
        assert list(pool.map(lambda n: n**2, range(9))) == [n**2 for n in range(9)]
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_an_error_gets_out_and_leaves_torchs_threads_alone():
    with pytest.raises(ZeroDivisionError), workers() as pool:
        list(pool.map(lambda n: 1 / n, [1, 0]))
    assert torch.get_num_threads() == 3
