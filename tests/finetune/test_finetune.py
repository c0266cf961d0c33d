"""Fine-tuning as a user meets it: runs that end, stop and continue; models by folder; messages in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_language
import torch
from hydra import compose, initialize_config_module

from pbrl.finetune import language, pretrained
from pbrl.finetune import runs as finetune_runs
from pbrl.finetune.paraphrases import Example
from pbrl.finetune.tuning import command, finetune
from pbrl.run import checkpoint
from pbrl.run.record import columns, read
from pbrl.run.settings import ConfigurationError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_language.save(folder / "bert", "bert")
    tiny_language.save(folder / "headless", "bert", masked=False)
    tiny_language.save(folder / "roberta", "roberta")
    tiny_language.write_data(folder / "data.tsv")
    return folder


def overrides(tiny: Path, *more: str) -> list[str]:
    return [
        f"model.path={tiny / 'bert'}", "model.layers=3", "model.tuned_layers=2", f"task.path={tiny / 'data.tsv'}",
        "task.validation=12", "batch_size=8", "iterations=12", "evaluation.every=3", "checkpoint_every=4",
        "wandb.mode=disabled", "threads=1", *more,
    ]  # fmt: skip


def tune(tiny: Path, *more: str) -> Path:
    with initialize_config_module("conf"):
        cfg = compose("finetune", overrides=overrides(tiny, *more), return_hydra_config=False)
        finetune(cfg)
        return Path(cfg.folder)


def weights(folder: Path) -> dict[str, Any]:
    saved = checkpoint.load(folder / "checkpoint")
    assert saved is not None
    return dict(saved[1]["weights"])


def same(one: Path, other: Path) -> bool:
    kept = ("iteration", "loss", "moved", "accuracy", "validation_loss")
    records = [[{k: v for k, v in row.items() if k in kept} for row in read(p / "metrics.jsonl")] for p in (one, other)]
    ours, theirs = weights(one), weights(other)
    return records[0] == records[1] and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("method", ["ncrs", "mezo", "rsgf", "sgd"])
def test_a_run_that_was_stopped_continues_bit_for_bit(method: str, tiny: Path, tmp_path: Path) -> None:
    changes = (f"method={method}", "lr=0.001")  # short steps, so that none diverges
    whole = tune(tiny, *changes, f"root={tmp_path / 'whole'}")
    tune(tiny, *changes, f"root={tmp_path / 'parts'}", "iterations=7")  # evaluated at 7, unlike the whole
    parts = tune(tiny, *changes, f"root={tmp_path / 'parts'}")
    assert same(whole, parts)
    metrics = columns(read(whole / "metrics.jsonl"))
    assert metrics["iteration"].tolist() == list(range(12))
    assert np.flatnonzero(np.isfinite(metrics["accuracy"])).tolist() == [2, 5, 8, 11]


def test_sgd_learns_and_ends_at_its_target(tiny: Path, tmp_path: Path) -> None:
    changes = ("method=sgd", "lr=0.1", "iterations=300", "target=0.75", "model.head=linear")
    folder = tune(tiny, *changes, f"root={tmp_path}")
    run = finetune_runs.load(folder)
    assert run.ended == "arrived"
    assert run.accuracy[-1] > 0.75 >= max(run.accuracy[:-1])
    assert run.iterations == run.iteration[-1] == run.reached(0.75)


def test_a_search_that_diverges_ends_and_says_so(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tune(tiny, "method=mezo", "lr=1000", f"root={tmp_path}", "iterations=40")
    assert finetune_runs.load(folder).ended == "diverged"
    assert "smaller step or radius" in caplog.text


def test_the_target_and_the_hyperparameters_come_from_earlier_runs(tiny: Path, tmp_path: Path) -> None:
    root = f"root={tmp_path}"
    with pytest.raises(ConfigurationError, match="run method=sgd first"):
        tune(tiny, root, "target=sgd")
    with pytest.raises(ConfigurationError, match="sweep first"):
        tune(tiny, root, "tuned=true")
    sgd = [finetune_runs.load(tune(tiny, root, "method=sgd", f"lr={lr}")) for lr in (1e-4, 0.2)]
    ncrs = [finetune_runs.load(tune(tiny, root, f"lr={lr}")) for lr in (1e-6, 0.02)]
    run = finetune_runs.load(tune(tiny, root, "tuned=true", "target=sgd", "seed=1"))
    assert run.target == min(sgd, key=lambda each: each.lowest_loss).best_accuracy
    assert run.hyperparameters == min(ncrs, key=lambda each: each.lowest_loss).hyperparameters


@pytest.mark.slow
def test_a_killed_run_continues_as_if_nothing_had_happened(tiny: Path, tmp_path: Path) -> None:
    changes = ("method=mezo", "iterations=300", "evaluation.every=150", "checkpoint_every=150")
    whole = tune(tiny, *changes, f"root={tmp_path / 'whole'}")
    command = [sys.executable, "-m", "pbrl.finetune", *overrides(tiny, *changes), f"root={tmp_path / 'parts'}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not any(path.stat().st_size for path in (tmp_path / "parts").rglob("metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert next((tmp_path / "parts").rglob("state.json")).parent.name != "000299"
    parts = tune(tiny, *changes, f"root={tmp_path / 'parts'}")
    assert same(whole, parts)


def load(tiny: Path, kind: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "name": kind, "source": "hub:none", "path": str(tiny / kind), "like": None, "layers": 3,
        "new_layers": 0, "head": "masked", "template": "{first} {mask}, {second}", "words": ["no", "yes"],
        "max_tokens": 16, "cache_folder": str(tiny / "cache"), "seed": 0,
    }  # fmt: skip
    return pretrained.load(**{**settings, **changes})


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_prompt_asks_the_models_own_head(kind: str, tiny: Path) -> None:
    import transformers

    model, reader = load(tiny, kind)
    examples = [Example("the cat sat", "a cat ran home", 1), Example("a dog", "the cat", 0)]
    batch = language.pad([reader(each) for each in examples], torch.tensor([1, 0]), None)
    tokenizer = reader.tokenizer
    whole = transformers.AutoModelForMaskedLM.from_pretrained(tiny / kind).eval()
    with torch.inference_mode():
        scores = model(batch)
        for row, example in enumerate(examples):
            text = f"{example.first} {tokenizer.mask_token}, {example.second}"
            found = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            gap = (found["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
            expected = whole(**found).logits[0, gap, tokenizer.convert_tokens_to_ids(["no", "yes"])]
            torch.testing.assert_close(scores[row], expected, atol=1e-5, rtol=1e-5)
    long = reader(Example("cat " * 30, "dog " * 5, 1))
    assert len(long.ids) <= 16
    assert (long.ids == tokenizer.mask_token_id).sum() == 1


def test_prompted_models_are_tuned_with_their_embeddings(tiny: Path, tmp_path: Path) -> None:
    prompt = ("model=roberta_large", "model.words=[no,yes]", f"model.path={tiny / 'roberta'}", "model.tuned_layers=3")
    folder = tune(tiny, *prompt, f"root={tmp_path}", "method=mezo", "lr=0.001")
    names = weights(folder)
    assert "embeddings.word_embeddings.weight" in names
    assert not any(name.endswith("decoder.weight") for name in names)  # it is the word embeddings


def test_the_cosine_is_that_of_the_encoders_own_mean_states(tiny: Path) -> None:
    import transformers

    model, reader = load(tiny, "bert", head="cosine")
    examples = [Example("the cat sat", "a cat ran home", 1), Example("a dog", "the cat", 0)]
    batch = language.pad([reader(each) for each in examples], torch.tensor([1, 0]), None)
    whole = transformers.AutoModel.from_pretrained(tiny / "bert", add_pooling_layer=False).eval()
    with torch.inference_mode():
        cosines = model.head.cosines(model.states(batch))
        for row, example in enumerate(examples):
            found = reader.tokenizer(example.first, example.second, return_tensors="pt")
            states = whole(**found).last_hidden_state[0]
            end = 1 + len(example.first.split())  # [CLS] first [SEP] second [SEP]
            u, v = states[1:end].mean(0), states[end + 1 : -1].mean(0)
            torch.testing.assert_close(cosines[row], u @ v / u.norm() / v.norm(), atol=1e-5, rtol=1e-5)
    assert set(model.tune(layers=0, embeddings=False)) == {"head.gain", "head.shift"}
    layers = set(model.tune(layers=1, embeddings=False))
    assert "layers.2.output.dense.weight" in layers
    assert "layers.2.output.LayerNorm.weight" not in layers  # the head has it


def test_the_cosine_head_begins_with_the_line_of_logistic_regression() -> None:
    rng = np.random.default_rng(0)
    head = language.CosineHead(torch.nn.LayerNorm(4))
    states = torch.tensor(rng.standard_normal((4000, 2, 4)), dtype=torch.float32)
    with torch.no_grad():
        cosines = head.cosines(states).numpy()
    labels = torch.tensor(rng.random(4000) < 1 / (1 + np.exp(-(3 * cosines - 1)))).long()
    head.fit(states, labels)
    assert head.slope.item() == pytest.approx(3, abs=0.3)
    assert head.bias.item() == pytest.approx(-1, abs=0.15)
    shares = torch.softmax(head(states), 1)[:, 1]
    assert shares.mean().item() == pytest.approx(labels.double().mean().item(), abs=1e-4)  # as the likelihood wants it
    head.fit(torch.ones(5, 2, 4), torch.tensor([0, 1, 1, 1, 1]))  # all alike
    assert torch.softmax(head(torch.ones(1, 2, 4)), 1)[0, 1].item() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("head", ["linear", "cosine"])
@pytest.mark.parametrize("tuned_layers", [0, 1, 2, 3])
def test_what_is_computed_once_gives_the_same_losses(tuned_layers: int, head: str, tmp_path: Path) -> None:
    cached, computed = (
        tiny_language.problem(tmp_path, tuned_layers=tuned_layers, head=head, cache_gib=gib) for gib in (1.0, 0.0)
    )
    assert cached.cached
    assert not computed.cached
    assert list(cached.tuned) == list(computed.tuned)
    for iteration in range(3):
        one, other = (problem.loss(problem.batch(iteration)).item() for problem in (cached, computed))
        assert one == pytest.approx(other, abs=1e-5)
    assert cached.evaluate() == pytest.approx(computed.evaluate(), abs=1e-5)


def test_the_last_layer_at_one_place_is_the_layer(tmp_path: Path) -> None:
    problem = tiny_language.problem(tmp_path, tuned_layers=1)
    batch, layer = problem.batch(0), problem.model.layers[-1]
    assert batch.hidden is not None
    assert not batch.attend.all()  # there is padding
    with torch.inference_mode():
        whole = layer(batch.hidden, batch.attend)[torch.arange(8), batch.place]
        torch.testing.assert_close(language.at_place(layer, batch.hidden, batch.attend, batch.place), whole)


def test_settings_change_what_they_say(tmp_path: Path) -> None:
    plain, other_seed = tiny_language.problem(tmp_path), tiny_language.problem(tmp_path, seed=1)
    fresh, short = (
        tiny_language.problem(tmp_path, new_layers=1),
        tiny_language.problem(tmp_path, layers=2, tuned_layers=2),
    )

    def changed(problem: Any, reference: Any = plain) -> set[str]:
        ours, theirs = problem.model.state_dict(), reference.model.state_dict()
        return {".".join(name.split(".")[:2]) for name in ours if not torch.equal(ours[name], theirs[name])}

    assert changed(other_seed) == {"head.weight"}
    assert changed(fresh) == {"layers.2", "head.weight"}  # one generator makes both
    assert changed(short) == set()
    assert len(short.model.layers) == 2
    assert plain.data == other_seed.data  # all runs are judged by the same examples


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("model.layers=4",), "model.layers must be between 1 and 3"),
        (("model.new_layers=4",), "model.new_layers must be between 0"),
        (("model.tuned_layers=9",), "model.tuned_layers must be between 0 and 3"),
        (("model.tune_embeddings=true",), "needs all layers above them tuned"),
        (("model.path=/nowhere",), "no config.json"),
        (("model.head=tail",), "model.head must be masked, cosine or linear, not 'tail'"),
        (("model.head=masked",), "model.head=masked needs a model.template"),
        (("head_examples=0",), "head_examples must be a whole number"),
        (("target=7.0",), "target must be null, sgd, or an accuracy"),
        (("batch_size=0",), "batch_size must be a whole number"),
        (("seed=x",), "seed must be a whole number"),
        (("resume=no",), "resume must be true or false, not 'no'"),
        (("tensorboard=no",), "tensorboard must be true or false, not 'no'"),
        (("threads=10000000000",), "threads must be at most 10000"),
        (("wandb=x",), "wandb is a group of settings"),
        (("wandb.finish_seconds=abc",), "wandb.finish_seconds must be a number of seconds, not 'abc'"),
        (("batch_size=1000",), "batch_size=1000 is more than the 48"),
        (("lr=fast",), "step must be"),
        (("lr=-1.0",), "step must be positive"),
        (("model.max_tokens=many",), "model.max_tokens must be a whole number"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_named_and_leaves_no_folder(
    changes: Any, words: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words):
        tune(tiny, *changes, f"root={tmp_path / 'runs'}", "cache_gib=0.0")
    assert not any((tmp_path / "runs").rglob("config.yaml"))


def test_a_model_without_a_masked_head_is_not_asked_for_one(tiny: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no masked-LM head: set model\.head=cosine"):
        load(tiny, "headless")
    with pytest.raises(ConfigurationError, match="'no way' is 2 tokens"):
        load(tiny, "bert", words=["no way", "yes"])


def test_without_a_hub_both_ways_out_are_named(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PYTHONWARNINGS": ""}
    command = [sys.executable, "-m", "pbrl.finetune", "model=roberta_large", "task.path=none", "wandb.mode=disabled"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert "hf auth login" in done.stderr
    assert "model.path=/folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.rglob("config.yaml"))


def test_the_record_is_strict_json(tiny: Path, tmp_path: Path) -> None:
    folder = tune(tiny, f"root={tmp_path}", "iterations=3", "keep_weights=false")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"iteration", "loss", "moved", "seconds_learn"} <= set(rows[0])
    assert weights(folder) == {}
    with pytest.raises(ConfigurationError, match="without keeping its weights"):
        tune(tiny, f"root={tmp_path}", "iterations=6", "keep_weights=false")


def test_a_sweep_continues_after_a_refused_run_and_lists_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = ["-m", "lr=-1.0,0.001", f"root={tmp_path}", "iterations=3", "target=null,2.0"]
    monkeypatch.setattr(sys, "argv", ["finetune", *overrides(tiny), *sweep])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 1
    (run,) = finetune_runs.find(tmp_path)
    assert run.finished
    assert run.hyperparameters == (0.001, None)
    _, _, summary = capfd.readouterr().err.partition("3 runs of this sweep were refused:\n")
    lines = summary.strip().splitlines()
    assert ["lr=-1.0" in line for line in lines] == [True, True, False]
    assert "step must be positive, not -1.0" in lines[0]
    assert all("target must be null, sgd, or an accuracy" in line for line in lines[1:])


@pytest.mark.slow
def test_a_refused_run_in_another_process_makes_the_sweep_fail(tiny: Path, tmp_path: Path) -> None:
    sweep = ["-m", "lr=-1.0,0.001", f"root={tmp_path}", "iterations=3", "hydra/launcher=joblib"]
    command = [sys.executable, "-m", "pbrl.finetune", *overrides(tiny), *sweep]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "refused" in done.stderr
    assert "step must be positive, not -1.0" in done.stderr
    assert [run.hyperparameters for run in finetune_runs.find(tmp_path)] == [(0.001, None)]


def test_a_method_of_ones_own_must_be_allowed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from pbrl.finetune.tuning import SGD\n\n\nclass Mine(SGD):\n    pass\n"
    (tmp_path / "my_method.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    changes = ("method=sgd", "method._target_=my_method.Mine", "iterations=3", f"root={tmp_path}")
    with pytest.raises(ConfigurationError, match=r"add allow=\[my_method\]"):
        tune(tiny, *changes)
    assert finetune_runs.load(tune(tiny, *changes, "allow=[my_method]")).finished


def test_what_is_not_a_run_of_fine_tuning_is_left_out(tmp_path: Path) -> None:
    for name, settings in {"other": "agent: {}", "bomb": "a: &a [*a]", "list": "[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(settings)
        (tmp_path / name / "metrics.jsonl").write_text('{"iteration": 0}\n')
    runs, left_out = finetune_runs.find_all(tmp_path)
    assert not runs
    assert [path.name for path in left_out] == ["bomb", "list", "other"]
