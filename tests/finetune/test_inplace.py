"""Weights moved in place: directions are normal, moving back is exact, and the steps are those of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_language
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pbrl.finetune import inplace
from pbrl.finetune.inplace import BLOCK, PIECE, DivergedError, InPlace, Piece, direction_key, move_by_torch
from pbrl.search import NCRS, RSGF, MeZO

RULES: list[Any] = [NCRS(step=0.01), RSGF(step=0.02, radius=0.01), MeZO(step=0.02, radius=0.01)]


def in_place(rule: Any, parameters: dict[str, torch.Tensor], **changes: Any) -> InPlace:
    return InPlace(rule=rule, parameters=parameters, **{"seed": 3, "headroom": 4.0, "threads": 2, **changes})


def direction(size: int, iteration: int = 0, **changes: Any) -> Any:
    """s itself: what zeros become when they are moved by 1; on a grid of 2^-20."""
    weights = torch.zeros(size)
    search = in_place(RULES[0], {"w": weights}, headroom=16.0, **changes)
    search.iteration = iteration
    search.move_to(1.0)
    return weights.numpy().astype(np.float64)


def test_directions_are_standard_normal() -> None:
    s = direction(2**20)
    assert stats.kstest(s, "norm").pvalue > 1e-3
    assert stats.kstest(s[np.abs(s) > 3], stats.norm.cdf).statistic > 0.4  # the test has power
    tail = stats.norm.sf(3) * 2
    assert stats.binomtest(int((np.abs(s) > 3).sum()), len(s), tail).pvalue > 1e-3
    for power in (1, 2):
        for lag in (1, 2, BLOCK // 2, BLOCK):  # a block's second half shares its radii with the first
            assert abs(np.corrcoef(s[:-lag] ** power, s[lag:] ** power)[0, 1]) < 4.5 / np.sqrt(len(s))


def test_directions_of_iterations_and_seeds_are_independent() -> None:
    directions = [direction(2**18, t) for t in range(3)] + [direction(2**18, 0, seed=4)]
    correlations = np.corrcoef(directions)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 4.5 / 2**9


def test_numbers_depend_on_their_place_alone() -> None:
    whole = direction(3 * PIECE + 17)
    assert np.array_equal(whole, direction(3 * PIECE + 17, threads=1))
    assert np.array_equal(whole[: PIECE + 5], direction(PIECE + 5))


@pytest.mark.parametrize("move", ["compiled", "torch"])
def test_thousands_of_moves_there_and_back_are_exact(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if move == "torch":
        monkeypatch.setattr(inplace, "_go", None)
        monkeypatch.setattr(inplace, "_move", move_by_torch)
    generator = torch.Generator().manual_seed(0)
    parameters = {"a": torch.randn(37, 5, generator=generator), "b": 1e-4 * torch.randn(64, generator=generator)}
    search = in_place(RULES[2], parameters, threads=1)
    before = {name: weights.clone() for name, weights in parameters.items()}
    for t in range(10_000 if move == "compiled" else 1000):
        search.iteration = t
        for offset in (1e-3, -1e-3, 0.0) if t % 2 else (3e-2, 0.0):
            search.move_to(offset)
            assert not torch.equal(parameters["a"], before["a"]) or offset == 0
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)


@given(offsets=st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=8))
def test_the_weights_do_not_depend_on_earlier_moves(offsets: list[float]) -> None:
    start = torch.linspace(-1, 1, 50)
    direct, roundabout = {"w": start.clone()}, {"w": start.clone()}
    one, other = in_place(RULES[0], direct), in_place(RULES[0], roundabout)
    for offset in offsets:
        other.move_to(offset)
    one.move_to(offsets[-1])
    assert torch.equal(direct["w"], roundabout["w"])


def test_rounding_is_finer_than_float32_steps_matter() -> None:
    start = torch.linspace(-1, 1, 4096)
    weights = start.clone()
    search = in_place(RULES[0], {"w": weights})
    assert (weights - start).abs().max() <= 2.0**-23  # half a step of the grid 2^-22
    search.move_to(0.01)
    expected = start.numpy() + 0.01 * direction(4096)
    np.testing.assert_allclose(weights.numpy(), expected, atol=2.0**-21)


@pytest.mark.parametrize("rule", RULES)
def test_an_iteration_takes_the_step_computed_by_hand(rule: Any) -> None:
    # f(w) = w_0^2 + w_1 + ... at w = (1, ..., 1), along the known direction s
    s = direction(6)

    def f(w: Any) -> Any:
        return w[0] ** 2 + w[1:].sum()

    w = np.ones(6)
    if isinstance(rule, NCRS):
        move = 0.01 if f(w + 0.01 * s) < f(w) else 0.0
        assert move == (0.01 if 2 * s[0] + s[1:].sum() < 0 else 0.0)  # small steps: as the gradient says
    elif isinstance(rule, RSGF):
        move = -0.02 * (f(w + 0.01 * s) - f(w)) / 0.01
    else:
        move = -0.02 * (f(w + 0.01 * s) - f(w - 0.01 * s)) / 0.02
    weights = torch.ones(6)
    search = in_place(rule, {"w": weights})
    metrics = search.step(lambda: f(weights))
    assert metrics["moved"] == pytest.approx(move, rel=1e-3)
    np.testing.assert_allclose(weights.numpy(), w + move * s, atol=1e-5)
    assert search.iteration == 1


def test_ncrs_rejects_without_a_trace_and_accepts_in_full() -> None:
    weights = torch.ones(6)
    search = in_place(NCRS(step=0.01), {"w": weights})
    losses = iter([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(2.0), torch.tensor(1.0)])
    assert search.step(lambda: next(losses))["moved"] == 0.0
    assert torch.equal(weights, torch.ones(6))
    assert search.step(lambda: next(losses))["moved"] == 0.01
    np.testing.assert_allclose(weights.numpy(), 1 + 0.01 * direction(6, 1), atol=1e-6)


@pytest.mark.parametrize("rule", [RSGF(step=1e-3, radius=1e-3), MeZO(step=1e-3, radius=1e-3)])
def test_estimates_agree_with_autograd_in_expectation(rule: Any, tmp_path: Path) -> None:
    # E g = grad f (+ O(mu)). Of n estimates along n directions, the mean of each projection v . g has standard error
    # |grad f| |v| sqrt(~1/n); v = grad f and v at random.
    problem = tiny_language.problem(tmp_path, tuned_layers=1)
    batch = problem.batch(0)
    problem.loss(batch).backward()  # type: ignore[no-untyped-call]
    # The bias of the last layer's keys moves all scores alike: the loss does not depend on it, and it has no gradient.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in problem.tuned.values()]
    gradient = torch.cat([each.flatten() for each in gradients]).numpy()
    parameters = dict(problem.tuned)
    search = in_place(rule, parameters, threads=1)
    start = torch.cat([p.detach().flatten() for p in parameters.values()])
    probes = np.stack([gradient, np.random.default_rng(0).standard_normal(len(gradient)).astype(np.float32)])
    estimates = []
    for t in range(600):
        search.iteration = t
        search.step(lambda: problem.loss(batch))
        here = torch.cat([p.detach().flatten() for p in parameters.values()])
        estimates.append(probes @ (start - here).numpy() / 1e-3)  # theta - theta' = eta g
        with torch.no_grad():
            for p, original in zip(
                parameters.values(), start.split([p.numel() for p in parameters.values()]), strict=True
            ):
                p.copy_(original.view_as(p))
    mean, error = np.mean(estimates, 0), np.std(estimates, 0) / np.sqrt(len(estimates))
    truth = probes @ gradient
    assert (np.abs(mean - truth) < 4 * error + 0.01 * np.abs(truth)).all()
    assert error[0] < 0.2 * truth[0]  # so that a wrong factor of 2 or sign would be seen


def test_weights_too_large_for_their_grid_are_reported() -> None:
    search = in_place(RULES[0], {"head.bias": torch.ones(100)})
    with pytest.raises(DivergedError, match=r"head\.bias are too large for the grid .* smaller step or radius"):
        search.move_to(5.0)


def test_a_loss_that_is_not_finite_is_reported_with_the_weights_as_they_were() -> None:
    weights = torch.ones(100)
    search = in_place(RULES[2], {"w": weights})
    with pytest.raises(DivergedError, match="the loss is nan"):
        search.step(lambda: torch.tensor(float("nan")))
    assert torch.equal(weights, torch.ones(100))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"headroom": 1.0}, "headroom"), ({"parameters": {"w": torch.ones(3).double()}}, "w is torch.float64")],
)
def test_wrong_settings_are_named(changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        InPlace(
            **{
                "rule": RULES[0],
                "parameters": {"w": torch.ones(3)},
                "seed": 0,
                "headroom": 4.0,
                "threads": 1,
                **changes,
            }
        )


def test_torch_moves_by_normal_directions_on_the_same_grid() -> None:
    piece = Piece("w", torch.zeros(2**16), 0, 2.0**-20)
    assert move_by_torch(piece, direction_key(0, 0), 0.0, 1.0)[0]
    assert stats.kstest(piece.weights.numpy(), "norm").pvalue > 1e-3
    assert torch.equal(torch.round(piece.weights * 2**20), piece.weights * 2**20)


@pytest.mark.parametrize("move", ["compiled", "torch"])
def test_steps_that_are_too_short_are_counted_and_said(
    move: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of half the grid's unit moves the weights whose part of the direction is more than 1: a third of them."""
    if move == "torch":
        monkeypatch.setattr(inplace, "_move", move_by_torch)
    unit = 2.0**-22  # of weights up to 1, with a headroom of 4
    search = in_place(RSGF(step=1.0, radius=unit / 2), {"w": torch.zeros(50_000)})
    assert search.step(lambda: torch.tensor(1.0))["unmoved"] == pytest.approx(2 * stats.norm.cdf(1) - 1, abs=0.02)
    assert "a step was too short to move 68 % of the weights, which are multiples of 2.4e-07" in caplog.text
    assert search.step(lambda: torch.tensor(1.0))["unmoved"] > 0.5
    assert len(caplog.records) == 1  # said once
    caplog.clear()
    search = in_place(RSGF(step=1.0, radius=0.01), {"w": torch.zeros(50_000)})
    assert search.step(lambda: torch.tensor(1.0))["unmoved"] < 0.001
    assert not caplog.records
