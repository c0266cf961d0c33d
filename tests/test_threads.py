"""Cores, and workers: results in order, and torch's own threads as they were."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from pbrl.threads import cores, threads_of_a_job, workers


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_workers_take_the_place_of_torchs_threads():
    with workers() as pool:
        assert pool.threads == 3
        assert torch.get_num_threads() == 1
        assert set(pool.map(lambda _: torch.get_num_threads(), range(9))) == {1}
        assert list(pool.map(lambda n: n**2, range(9))) == [n**2 for n in range(9)]
    assert torch.get_num_threads() == 3


def test_one_thread_is_the_one_that_asks():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with workers() as pool:
            here, done = threading.get_ident(), []
            results = pool.map(lambda n, m: (threading.get_ident(), done.append(n), n * m), [1, 2, 3], [4, 5, 6])
            assert done == [1, 2, 3]  # nobody need ask for the results
            assert [*results] == [(here, None, 4), (here, None, 10), (here, None, 18)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_the_thread_that_asks_is_one_of_three():
    together = threading.Barrier(3)  # passed only if three threads are at work at once

    def meet(n):
        together.wait(timeout=60)
        return n, threading.get_ident()

    with workers() as pool:
        met = [*pool.map(meet, range(6))]
    assert [n for n, _ in met] == [*range(6)]
    threads = {thread for _, thread in met}
    assert len(threads) == 3
    assert threading.get_ident() in threads


TASKS = Path("/proc/self/task")  # the process's threads


@pytest.mark.skipif(not TASKS.is_dir(), reason="only Linux lists a process's threads there")
@pytest.mark.usefixtures("three_threads")
def test_a_product_in_a_worker_starts_no_threads_of_its_own():
    def multiply(_):
        x = torch.ones(500, 256)
        for _ in range(3):
            x = x @ torch.ones(256, 256)
        return len([*TASKS.iterdir()])

    with workers() as pool:
        list(pool.map(lambda _: time.sleep(0.05), range(3)))  # all three have started
        before = len([*TASKS.iterdir()])
        assert {*pool.map(multiply, range(9))} == {before}


@pytest.mark.usefixtures("three_threads")
def test_an_error_gets_out_and_leaves_torchs_threads_alone():
    with pytest.raises(ZeroDivisionError), workers() as pool:
        list(pool.map(lambda n: 1 / n, [1, 0]))
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can bind a process to cores")
def test_cores_are_those_that_the_process_may_use():
    allowed = os.sched_getaffinity(0)
    assert cores() == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("launcher", "threads"),
    [
        ({"n_jobs": 4}, 2),
        ({"n_jobs": -1}, 1),
        ({"n_jobs": -7}, 4),  # joblib: all cores but six, which is two jobs
        ({"n_jobs": 20}, 1),
        ({"cpus_per_task": 3}, 3),
        ({"cpus_per_task": None}, 8),
        ({"ray": {"remote": {"num_cpus": 2}}}, 2),
        ({"ray": {"remote": {}}}, 8),
        ({}, 8),
    ],
)
def test_a_job_gets_its_share_of_eight_cores(launcher, threads):
    assert threads_of_a_job(launcher, 8) == threads
