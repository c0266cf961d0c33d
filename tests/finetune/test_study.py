"""The study of intrinsic dimension: heads that agree with the model's own, and a program that goes on where it was."""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_language
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import nn

from pbrl.finetune import heads, language, paraphrases, pretrained, study, study_report
from pbrl.finetune.heads import Encoded
from pbrl.run.settings import ConfigurationError


@pytest.fixture
def encoded() -> Encoded:
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(40, 2, 6, generator=rng)
    states[:, 1] = states[:, 0] + torch.randn(40, 6, generator=rng)
    labels = (torch.rand(40, generator=rng) < 0.6).long()
    return Encoded(states, labels, 1 + 0.3 * torch.randn(6, generator=rng), 0.2 * torch.randn(6, generator=rng))


def cosine_head(gain: torch.Tensor, shift: torch.Tensor) -> language.CosineHead:
    norm = nn.LayerNorm(len(gain))
    norm.weight, norm.bias = nn.Parameter(gain), nn.Parameter(shift)
    return language.CosineHead(norm)


def test_many_norms_at_once_are_the_models_own_head(encoded: Encoded) -> None:
    head = heads.Norm(encoded)
    theta = torch.stack([head.start, head.start + 0.1 * torch.randn(12), torch.randn(12)])
    found = head.cosines(theta, head.features(encoded.states))
    expected = [cosine_head(each[:6], each[6:]).cosines(encoded.states) for each in theta]
    torch.testing.assert_close(found, torch.stack(expected, 1).detach(), atol=1e-5, rtol=1e-5)


def test_many_adapters_at_once_are_the_adapter_written_out(encoded: Encoded) -> None:
    head = heads.LowRank(encoded, rank=2, rng=np.random.default_rng(0))
    theta = torch.stack([head.start, torch.randn(12), 3 * torch.randn(12)])
    found = head.cosines(theta, head.features(encoded.states))
    x = encoded.states * encoded.gain + encoded.shift
    for run, weights in enumerate(theta):
        u, v = (x + x @ head.down @ weights.view(6, 2).T).unbind(1)
        torch.testing.assert_close(found[:, run], torch.cosine_similarity(u, v), atol=1e-5, rtol=1e-5)
    plain = cosine_head(encoded.gain, encoded.shift).cosines(encoded.states)
    torch.testing.assert_close(found[:, 0], plain.detach(), atol=1e-5, rtol=1e-5)  # it starts as the model is


def test_the_gradient_of_the_norm_is_that_of_the_formula(encoded: Encoded) -> None:
    head, width = heads.Norm(encoded), len(encoded.gain)
    theta = (head.start + 0.3 * torch.randn(3, 2 * width)).requires_grad_()
    outer = torch.randn(len(encoded.states), 3)
    found = head.cosines(theta, head.features(encoded.states))
    (gradient,) = torch.autograd.grad(found, theta, outer)
    x, y = (theta[:, :width] * each[:, None] + theta[:, width:] for each in encoded.states.unbind(1))
    expected = nn.functional.cosine_similarity(x, y, dim=2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, theta, outer)[0], atol=1e-5, rtol=1e-4)
    broken = theta.detach().clone()
    broken[1, 2] = torch.nan
    assert head.cosines(broken, head.features(encoded.states)).isnan().all(0).tolist() == [False, True, False]


def test_of_a_subset_only_the_chosen_weights_move(encoded: Encoded) -> None:
    head = heads.Norm(encoded)
    part = heads.Subset(head, torch.tensor([7, 2]))
    features = head.features(encoded.states)
    theta = head.start.clone()
    theta[7] += 0.5
    theta[2] -= 0.3
    found = part.cosines(torch.tensor([[0.0, 0.0], [0.5, -0.3]]), features)
    torch.testing.assert_close(found, head.cosines(torch.stack([head.start, theta]), features))


def test_the_steepest_weights_are_those_of_the_loss_over_the_training_examples(encoded: Encoded) -> None:
    cfg = {"task": {"validation": 10}, "head_examples": 30, "batch_size": 10}
    whole = study.build_split(study.Setting("a", 1, 0, 1.0, "norm", None), encoded, {**cfg, "batch_size": 30}, 0)
    part = study.build_split(study.Setting("a", 1, 0, 1.0, "norm", 3), encoded, cfg, 0)

    def loss(weight: int, step: float) -> float:
        theta = whole.head.start.clone()[None]
        theta[0, weight] += step
        return whole.losses(theta, np.random.default_rng(0)).item()

    slopes = [abs(loss(weight, 0.01) - loss(weight, -0.01)) for weight in range(12)]
    assert isinstance(part.head, heads.Subset)
    assert set(part.head.chosen.tolist()) == set(np.argsort(slopes)[-3:])
    with pytest.raises(ConfigurationError, match="more than the 12 weights"):
        study.build_split(study.Setting("a", 1, 0, 1.0, "norm", 13), encoded, cfg, 0)


def test_losses_and_accuracies_are_those_of_the_models_own_head(encoded: Encoded) -> None:
    head = heads.Norm(encoded)
    split = heads.Split(
        head, encoded, training=np.arange(30), validation=np.arange(30, 40), batch_size=30, line=(4.0, -1.0)
    )
    own = cosine_head(encoded.gain, encoded.shift)
    own.slope.fill_(4.0)
    own.bias.fill_(-1.0)
    with torch.no_grad():
        scores = own(encoded.states)
    loss = nn.functional.cross_entropy(scores[:30], encoded.labels[:30])
    assert split.losses(head.start[None], np.random.default_rng(0)).item() == pytest.approx(loss.item(), abs=1e-5)
    accuracy, validation_loss = split.evaluate(head.start[None])
    assert accuracy.item() == pytest.approx((scores[30:].argmax(1) == encoded.labels[30:]).float().mean().item())
    expected = nn.functional.cross_entropy(scores[30:], encoded.labels[30:])
    assert validation_loss.item() == pytest.approx(expected.item(), abs=1e-5)
    small = heads.Split(head, encoded, training=np.arange(30), validation=np.arange(10), batch_size=10, line=(4.0, 0.0))
    rng = np.random.default_rng(0)
    drawn = {round(small.losses(head.start[None], rng).item(), 6) for _ in range(40)}
    assert len(drawn) == 3  # minibatches


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_language.save(folder / "model", "bert", masked=False)
    tiny_language.write_data(folder / "data.tsv", examples=90)
    return folder


def configuration(tiny: Path, root: Path, *more: str) -> dict[str, Any]:
    changes = [
        f"root={root}", f"task.path={tiny / 'data.tsv'}", "task.validation=30", "batch_size=20", "head_examples=20",
        f"models.minilm.path={tiny / 'model'}", "seeds=[0,1]", "tuning_seeds=[7]", "sgd.iterations=30",
        "sgd.lr=[0.1,1]", "dimension.iterations=20", "search.iterations=120",
        "search.accuracy_iterations=60", "search.tuning_iterations=30",
        "search.ncrs.length=[0.1,0.4]", "search.finalists=1",
        "search.mezo={rate:[1,10],mu:[0.01]}", "search.rsgf={rate:[1,10],mu:[0.01]}", "evaluation_growth=1.2",
        "smoothing=3",
        "settings=[{model:minilm,layers:[3,2],new_layers:0,share:1.0,weights:norm,steepest:null},"
        "{model:minilm,layers:3,new_layers:1,share:0.8,weights:rank_2,steepest:8}]",
        *more,
    ]  # fmt: skip
    with initialize_config_module("conf"):
        cfg: Any = OmegaConf.to_container(compose("finetune_study", overrides=changes), resolve=True)
    return dict(cfg)


def test_the_states_are_those_that_the_cosine_head_reads(tiny: Path, tmp_path: Path) -> None:
    cfg = configuration(tiny, tmp_path)
    examples = study.all_examples(cfg["task"])
    how = {"batch_size": 7, "cache_folder": tmp_path}
    study.encode(cfg["models"]["minilm"], examples, layers=[2, 3], new_layers=0, **how)
    for layers in (2, 3):
        found = study.load_states(study.states_path(tmp_path, "minilm", layers, 0))
        model, reader = pretrained.load(
            **{key: cfg["models"]["minilm"][key] for key in ("name", "source", "path", "like", "max_tokens")},
            layers=layers, new_layers=0, head="cosine", template=None, words=None, cache_folder="", seed=0,
        )  # fmt: skip
        batch = language.pad([reader(each) for each in examples], torch.zeros(90, dtype=torch.long), None)
        with torch.inference_mode():
            torch.testing.assert_close(found.states, model.states(batch), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.gain, model.head.gain.detach())
        torch.testing.assert_close(found.shift, model.head.shift.detach())
        assert found.labels.tolist() == [example.label for example in examples]


def test_the_study_does_what_is_missing_and_nothing_twice(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configuration(tiny, tmp_path / "whole")
    study.run(cfg)
    files = {path.relative_to(tmp_path / "whole"): path.read_text() for path in (tmp_path / "whole").rglob("*.json")}
    assert len(files) == 3 * (1 + 1 + 2)
    study.run({**cfg, "root": str(tmp_path / "parts"), "seeds": [0]})
    monkeypatch.setattr(study, "encode", None)  # the states are there
    monkeypatch.setattr(study, "tune", None)
    study.run({**cfg, "root": str(tmp_path / "parts")})
    assert {
        path.relative_to(tmp_path / "parts"): path.read_text() for path in (tmp_path / "parts").rglob("*.json")
    } == files
    piece = json.loads(files[Path("minilm-layers_3-new_0-share_1-norm/measure_1.json")])
    assert piece["size"] == 32
    assert set(piece["subspaces"]) == {"4", "8", "16", "32", "full"}
    gain, reduction = piece["sgd"]["accuracy"] - piece["majority"], piece["start_loss"] - piece["sgd"]["lowest_loss"]
    assert piece["targets"]["gain"] == pytest.approx(piece["majority"] + 0.95 * gain)
    assert piece["targets"]["loss"] == pytest.approx(piece["start_loss"] - 0.8 * reduction)
    assert piece["targets"]["half"] == pytest.approx(piece["start_loss"] - 0.5 * reduction)
    other = json.loads(files[Path("minilm-layers_3-new_1-share_0.8-rank_2_8/measure_1.json")])
    assert other["size"] == 8
    assert other["majority"] == piece["majority"]  # every validation set has the same share of paraphrases


NAMES = [("ncrs", {"lr": 1.0}), ("ncrs", {"lr": 2.0}), ("ncrs", {"lr": 3.0}), ("mezo", {"lr": 1.0, "mu": 0.1})]


def test_finalists_have_the_lowest_mean_loss_of_the_tuning_seeds() -> None:
    def tuned(*losses: float) -> dict[str, Any]:
        return {"losses": [{"method": m, **c, "loss": loss} for (m, c), loss in zip(NAMES, losses, strict=True)]}

    found = study.finalists([tuned(0.5, 0.6, 0.8, 0.1), tuned(0.9, 0.7, 0.5, 0.1)], 2)
    assert found == [("ncrs", {"lr": 2.0}), ("ncrs", {"lr": 3.0}), ("mezo", {"lr": 1.0, "mu": 0.1})]


def test_the_finalist_that_arrives_soonest_is_chosen_and_the_lower_loss_among_equals() -> None:
    def selected(*iterations: int | None, losses: tuple[float, ...] = (0.5, 0.5, 0.5, 0.5)) -> dict[str, Any]:
        rows = zip(NAMES, iterations, losses, strict=True)
        return {"stopped": 1000, "losses": [{"method": m, **c, "iterations": i, "loss": x} for (m, c), i, x in rows]}

    chosen = study.choose([selected(100, 300, None, None), selected(900, 200, None, 40)])
    assert chosen == {"ncrs": {"lr": 2.0}, "mezo": {"lr": 1.0, "mu": 0.1}}
    equal = selected(None, None, None, None, losses=(0.5, 0.4, 0.3, 0.1))
    assert study.choose([equal, equal])["ncrs"] == {"lr": 3.0}


def test_sgd_has_its_best_rate_and_a_diverged_one_sets_no_target(tiny: Path, tmp_path: Path) -> None:
    cfg = configuration(tiny, tmp_path, "sgd.lr=[1e9,0.1,1]")
    (setting, *_) = study.settings(cfg["settings"])
    split = study.build_split(setting, study.states_of(setting, [setting], cfg, tmp_path), cfg, 0)
    goal = study.Goal(split, cfg=cfg, seed=0)
    losses = goal.sgd.smoothed(goal.sgd.losses, 3).min(0)
    assert goal.loss == losses.min() < goal.start_loss
    assert goal.rate in (0.1, 1)
    assert goal.arrivals(goal.sgd)[goal.best]["loss"] is not None


class Steps(study.Curves):
    """Curves of given accuracies, one evaluation in each iteration."""

    def __init__(self, accuracies: list[float]) -> None:
        self.iterations, self.accuracies = (
            list(range(1, len(accuracies) + 1)),
            [np.array([each]) for each in accuracies],
        )


def test_one_lucky_look_does_not_arrive() -> None:
    lucky, steady = Steps([0.7, 0.9, 0.7, 0.7, 0.7]), Steps([0.7, 0.7, 0.8, 0.8, 0.8])
    assert lucky.smoothed(lucky.accuracies, 3).max() == pytest.approx(2.3 / 3)
    assert steady.smoothed(steady.accuracies, 3)[:, 0].tolist() == pytest.approx([2.2 / 3, 2.3 / 3, 0.8])


def test_evaluations_are_as_dense_in_every_factor_of_time() -> None:
    due = study.evaluations(20000, 1.03)
    assert due[:5] == [1, 2, 3, 4, 5]
    assert due[-1] == 20000
    assert all(later / earlier < 1.035 for earlier, later in itertools.pairwise(due) if earlier > 200)
    assert len([each for each in due if 1000 < each <= 10000]) == math.floor(math.log(10) / math.log(1.03)) + 1


def test_settings_are_crossed_and_wrong_ones_are_named(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    entry = {
        "model": "a",
        "layers": [1, 2],
        "new_layers": 0,
        "share": 1.0,
        "weights": ["norm", "rank_2"],
        "steepest": None,
    }
    assert [each.name for each in study.settings([entry])] == [
        "a-layers_1-new_0-share_1-norm", "a-layers_1-new_0-share_1-rank_2",
        "a-layers_2-new_0-share_1-norm", "a-layers_2-new_0-share_1-rank_2",
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="weights must be norm or rank_1"):
        study.settings([{**entry, "weights": "rank_"}])
    with pytest.raises(ConfigurationError, match="needs model, layers"):
        study.settings([{"model": "a"}])
    with pytest.raises(ConfigurationError, match="unknown model 'a'; known are minilm"):
        study.run({**configuration(tiny, tmp_path), "settings": [entry]})
    cfg = configuration(tiny, tmp_path)
    cfg["models"]["minilm"] |= {"path": None, "source": "package:no_such_package/model"}
    study.run(cfg)  # says so, and has nothing else to do
    assert "3 settings of minilm are left out: " in capsys.readouterr().err


def test_a_split_keeps_the_share_of_paraphrases() -> None:
    labels = np.array([1] * 60 + [0] * 30)
    aside = paraphrases.draw_aside(labels, 30, np.random.default_rng(0))
    assert (aside.sum(), labels[aside].sum()) == (30, 20)
    assert (aside != paraphrases.draw_aside(labels, 30, np.random.default_rng(1))).any()


def piece(k: int, taken: dict[str, int | None], *, seed: int, start: float = 0.7) -> dict[str, Any]:
    """What a seed leaves of a setting of dimension k, the same for all targets."""
    dimensions = [str(d) for d in (4, 8, 16, 32, 64, 128)]
    subspaces = {
        d: {"accuracy": 0.8, "loss": 0.4} if d == "full" or int(d) >= k else {"accuracy": 0.7, "loss": 0.5}
        for d in [*dimensions, "full"]
    }
    reached = {"lr": 0.1, "accuracy": 0.8, "lowest_loss": 0.4}
    searches = {
        method: {"loss": when, "half": when, "gain": when, "best": when, "iterations": when or 5000, **reached}
        for method, when in taken.items()
    }
    return {
        "seed": seed, "accuracy_iterations": 4000,
        "majority": 0.6, "start": start, "start_loss": 0.6, "size": 128, "subspaces": subspaces,
        "targets": {"loss": 0.41, "half": 0.5, "gain": 0.75, "best": 0.81}, "searches": searches,
        "sgd": {"loss": 50, "half": 30, "gain": 40, "best": 90, **reached},
    }  # fmt: skip


@pytest.mark.slow
def test_the_report_has_the_exponent_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in (8, 16, 32, 64, 128):
        (tmp_path / f"k_{k}").mkdir()
        for seed in range(3):
            taken = {"ncrs": 10 * k + seed, "mezo": 100 + seed, "rsgf": None if k == 128 else 20 * k + seed}
            (tmp_path / f"k_{k}" / f"measure_{seed}.json").write_text(json.dumps(piece(k, taken, seed=seed)))
    (tmp_path / "idle").mkdir()  # it starts above its accuracy
    idle = piece(8, {"ncrs": 9, "mezo": 9, "rsgf": 9}, seed=0, start=0.79)
    (tmp_path / "idle" / "measure_0.json").write_text(json.dumps(idle))
    (tmp_path / "tuned_only").mkdir()
    measured = study_report.collect(tmp_path)
    assert [each.name for each in measured if not each.decides("gain")] == ["idle"]
    assert all(each.decides("loss") for each in measured)
    # 90 % of what is gained is eight tenths of the way from d' = k / 2 to d' = k, for the loss as for the accuracy
    (middle,) = (each for each in measured if each.name == "k_32")
    assert (middle.k("loss"), middle.k("gain")) == pytest.approx((16 * 2**0.8, 16 * 2**0.8))
    ncrs, mezo, rsgf = (study_report.trend_of(measured, method, "gain") for method in study.METHODS)
    assert ncrs is not None
    assert mezo is not None
    assert rsgf is not None
    assert ncrs.exponent == pytest.approx(1, abs=0.02)
    assert mezo.exponent == pytest.approx(0, abs=0.02)
    assert (rsgf.settings, rsgf.runs, rsgf.censored) == (5, 15, 3)
    (last,) = (each for each in measured if each.name == "k_128")
    assert (last.taken("rsgf", "gain")[0][0], last.taken("rsgf", "loss")[0][0]) == (4000, 5000)
    assert study_report.trend_of(measured, "ncrs", "gain", against="D") is None  # all have the same D
    monkeypatch.setattr(sys, "argv", ["study_report", str(tmp_path)])
    study_report.main()
    rows = list(csv.DictReader((tmp_path / "report" / "tables" / "settings.csv").read_text().splitlines()))
    assert len(rows) == 16
    assert [row["rsgf_loss"] for row in rows if row["setting"] == "k_128"] == ["", "", ""]
    page = (tmp_path / "report" / "index.html").read_text()
    assert "&gt; 5,000" in page
    assert "before rsgf in 15 of 15 runs that differ" in page


def test_the_median_knows_what_did_not_arrive() -> None:
    def words(*taken: int | None) -> str:
        numbers = np.array([float(each or 900) for each in taken])
        return study_report.in_words(numbers, np.array([each is not None for each in taken]))

    assert words(30, None, 20, 10, 1000) == "30 (10 to > 900)"
    assert words(None, None, 20) == "> 900 (20 to > 900)"
    assert words(7) == "7"


def test_a_folder_without_a_study_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["study_report", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="has no measured settings"):
        study_report.main()
