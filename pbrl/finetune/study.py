"""Do iterations grow with intrinsic dimension, and for which method? The study of docs/finetune.md, as one command.

    python -m pbrl.finetune.study task.path=/folder/with/mrpc

Many settings of different intrinsic dimension k: models, layers kept, layers reinitialised, shares of the data, and
which weights of the head are tuned. The network below the head is frozen and its output is computed once, so that all
methods of a setting are evaluated together, in one matrix product (`pbrl.finetune.heads`). Per setting:

    tune      by tuning seed: NCRS, MeZO, RSGF, all hyperparameters, a while
    select    by tuning seed: those with the lowest validation loss, until one
              is at the target; the soonest wins
    measure   by seed: SGD; Adam in random subspaces (SAID), for k; each search
              until it is at its targets

Every seed draws its own validation set, minibatches, subspaces and directions. Each of these pieces is a file in
`root`, and the same command does what is missing; seeds come in turn, so that an unfinished study has all settings with
fewer seeds. `python -m pbrl.finetune.study_report` makes the table, the figure and the trend of what is there.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from pbrl.finetune import heads, language, paraphrases, pretrained, said
from pbrl.finetune.heads import Encoded, Head, Split
from pbrl.finetune.paraphrases import DataError, Example
from pbrl.run.command_line import run_main
from pbrl.run.files import write_atomically
from pbrl.run.settings import ConfigurationError
from pbrl.search import NCRS, RSGF, Directions, MeZO, Rule, Search
from pbrl.seeds import streams
from pbrl.types import Float64

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One point of the study."""

    model: str
    layers: int  # kept, from the bottom
    new_layers: int  # reinitialised, from the top
    share: float  # of the training examples
    weights: str  # norm, or rank_4 and the like
    steepest: int | None  # how many of them are tuned: those with the steepest gradient at the start; None: all

    @property
    def name(self) -> str:
        """Of its folder."""
        tuned = self.weights if self.steepest is None else f"{self.weights}_{self.steepest}"
        return f"{self.model}-layers_{self.layers}-new_{self.new_layers}-share_{self.share:g}-{tuned}"


def settings(entries: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """All settings of the configuration; lists within an entry are crossed."""
    names = [field.name for field in fields(Setting)]
    found = []
    for entry in entries:
        if set(entry) != set(names):
            raise ConfigurationError(f"each of `settings` needs {', '.join(names)}; one has {', '.join(entry)}")
        values = [entry[name] if isinstance(entry[name], list) else [entry[name]] for name in names]
        found += [Setting(*chosen) for chosen in itertools.product(*values)]
    for setting in found:
        rank = setting.weights.removeprefix("rank_")
        if setting.weights != "norm" and not (rank != setting.weights and rank.isdigit() and int(rank) > 0):
            raise ConfigurationError(f"settings: weights must be norm or rank_1, rank_2 ..., not {setting.weights!r}")
    return found


def all_examples(task: Mapping[str, Any]) -> list[Example]:
    """All examples of the data set; every seed splits them anew."""
    if task["path"] is None:
        training, more = paraphrases.from_hub(task["name"], task["hub_name"], task["hub_configuration"])
        return [*training, *more]
    training, held_out = paraphrases.from_files(task["path"], task["malformed"])
    return [*training, *(held_out or [])]


# ---------------------------------------------------------------------------------------------- the frozen networks


@torch.inference_mode()
def encode(
    model: Mapping[str, Any],
    examples: Sequence[Example],
    *,
    layers: Sequence[int],
    new_layers: int,
    batch_size: int,
    cache_folder: Path,
) -> None:
    """Write the states of all examples above each of these layers to files, in one pass through the highest of them.

    A state is the mean over a sentence's tokens of what the layer's last LayerNorm makes before its gain and shift.
    """
    kept = ("name", "source", "path", "like", "max_tokens")
    network, reader = pretrained.load(
        **{key: model[key] for key in kept},
        layers=max(layers),
        new_layers=new_layers,
        head="linear",
        template=None,
        words=None,
        cache_folder=str(cache_folder),
        seed=0,  # the new layers are part of the setting: all seeds have the same
    )
    network.tune(layers=0, embeddings=False)
    tokens = [reader(example) for example in examples]
    norms: dict[int, Any] = {layer: network.layers[layer - 1].output.LayerNorm for layer in layers}  # type: ignore[union-attr]
    batch: language.Batch
    known: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(norm: nn.LayerNorm, inputs: tuple[Tensor]) -> None:
            hidden = functional.layer_norm(inputs[0], norm.normalized_shape, eps=norm.eps)
            belongs = torch.stack([batch.sentence == 0, batch.sentence == 1], 1).to(hidden.dtype)  # [B, 2, T]
            states = belongs @ hidden / belongs.sum(2, keepdim=True).clamp_min(1)
            known.setdefault(layer, torch.empty(len(tokens), *states.shape[1:]))[rows] = states

        return hook

    for layer, norm in norms.items():
        norm.register_forward_pre_hook(keep(layer))
    labels = torch.tensor([example.label for example in examples])
    for rows in tqdm(language.by_length(tokens, batch_size), desc=f"states of {model['name']}", leave=False):
        batch = language.pad([tokens[i] for i in rows], labels[rows], None)
        network.lower(batch.ids, batch.types, batch.attend)
    cache_folder.mkdir(parents=True, exist_ok=True)
    for layer, norm in norms.items():
        path = states_path(cache_folder, model["name"], layer, new_layers)
        unfinished = path.with_suffix(".new.npz")
        gain, shift = (each.detach().numpy() for each in (norm.weight, norm.bias))
        np.savez(unfinished, states=known[layer].numpy(), labels=labels.numpy(), gain=gain, shift=shift)
        unfinished.replace(path)


def states_path(folder: Path, model: str, layers: int, new_layers: int) -> Path:
    """Where the states above a layer are."""
    return folder / f"{model}-layers_{layers}-new_{new_layers}.npz"


def load_states(path: Path) -> Encoded:
    """Read what `encode` wrote."""
    with np.load(path) as found:
        return Encoded(*(torch.from_numpy(found[key]) for key in ("states", "labels", "gain", "shift")))


# ---------------------------------------------------------------------------------------------- one setting, one seed


def build_split(setting: Setting, encoded: Encoded, cfg: Mapping[str, Any], seed: int) -> Split:
    """The problem of a seed: its own validation set, training set and minibatches."""
    rng = np.random.default_rng(streams(seed, "split")["split"])
    aside = paraphrases.draw_aside(encoded.labels.numpy(), cfg["task"]["validation"], rng)
    training = rng.permutation(np.flatnonzero(~aside))
    training = training[: max(1, round(setting.share * len(training)))]
    first = torch.from_numpy(training[: cfg["head_examples"]])
    norm = nn.LayerNorm(len(encoded.gain))
    with torch.no_grad():
        norm.weight.copy_(encoded.gain)
        norm.bias.copy_(encoded.shift)
    line = language.CosineHead(norm)
    line.fit(encoded.states[first], encoded.labels[first])
    head: Head
    if setting.weights == "norm":
        head = heads.Norm(encoded)
    else:  # what is frozen in the adapter belongs to the setting
        rank = int(setting.weights.removeprefix("rank_"))
        head = heads.LowRank(encoded, rank=rank, rng=np.random.default_rng(0))

    def split(head: Head, batch_size: int) -> Split:
        slope_and_bias = float(line.slope), float(line.bias)
        rows = {"training": training, "validation": np.flatnonzero(aside)}
        return Split(head, encoded, batch_size=batch_size, line=slope_and_bias, **rows)

    if setting.steepest is not None:
        if setting.steepest > len(head.start):
            raise ConfigurationError(
                f"{setting.name}: steepest is more than the {len(head.start)} weights that there are"
            )
        theta = head.start[None].clone().requires_grad_()
        whole = split(head, len(training))  # one batch of all training examples
        (gradient,) = torch.autograd.grad(whole.losses(theta, rng).sum(), theta)
        head = heads.Subset(head, gradient[0].abs().topk(setting.steepest).indices)
    return split(head, cfg["batch_size"])


def evaluations(iterations: int, growth: float) -> list[int]:
    """When to evaluate: 1, 2, ... at first, then at iterations that grow by a factor, and at the last one."""
    count = math.ceil(math.log(iterations) / math.log(growth))
    return sorted({min(iterations, math.ceil(growth**i)) for i in range(count + 1)})


class Curves:
    """Accuracy and validation loss of R runs, evaluated now and then."""

    def __init__(self, split: Split, iterations: int, growth: float) -> None:
        self.split, self.due = split, evaluations(iterations, growth)
        self.iterations: list[int] = []
        self.accuracies: list[Float64] = []
        self.losses: list[Float64] = []

    def look(self, iteration: int, theta: Tensor) -> bool:
        """Evaluate weights [R, D] if it is time; iteration: from 1."""
        if len(self.iterations) == len(self.due) or iteration != self.due[len(self.iterations)]:
            return False
        accuracy, loss = (each.double().numpy() for each in self.split.evaluate(theta))
        self.iterations.append(iteration)
        self.accuracies.append(np.where(np.isfinite(loss), accuracy, 0.0))
        self.losses.append(np.nan_to_num(loss, nan=math.inf))
        return True

    def smoothed(self, values: Sequence[Float64], window: int) -> Float64:
        """Means of the last `window` evaluations, [evaluations - window + 1, R]."""
        return np.lib.stride_tricks.sliding_window_view(np.array(values), window, axis=0).mean(-1)  # type: ignore[no-any-return]


def run_sgd(split: Split, rates: Sequence[float], *, cfg: Mapping[str, Any], seed: int) -> Curves:
    """SGD with each learning rate."""
    curves = Curves(split, cfg["sgd"]["iterations"], cfg["evaluation_growth"])
    rng = np.random.default_rng(streams(seed, "sgd")["sgd"])
    theta = split.head.start.repeat(len(rates), 1).requires_grad_()
    lr = torch.tensor(rates, dtype=torch.float32)[:, None]
    for iteration in range(1, cfg["sgd"]["iterations"] + 1):
        (gradient,) = torch.autograd.grad(split.losses(theta, rng).sum(), theta)
        with torch.no_grad():
            theta -= lr * gradient.nan_to_num(0.0, 0.0, 0.0)
        curves.look(iteration, theta.detach())
    return curves


def run_searches(
    split: Split,
    rules: Sequence[Rule],
    *,
    iterations: int,
    growth: float,
    seed: int,
    progress: Callable[[int], None],
    over: Callable[[Curves], Sequence[bool]] | None = None,
) -> Curves:
    """The searches, one run for each rule; all see the same minibatches. A run that is over stays where it is."""
    curves = Curves(split, iterations, growth)
    stream = streams(seed, "minibatches", "directions")
    minibatches = np.random.default_rng(stream["minibatches"])
    directions = [np.random.default_rng(each) for each in stream["directions"].spawn(len(rules))]
    start = split.head.start.numpy()
    searches = [
        Search(start, rule=rule, directions=Directions("gaussian"), rng=rng)
        for rule, rng in zip(rules, directions, strict=True)
    ]
    going = searches
    for iteration in range(1, iterations + 1):
        points = np.stack([point for search in going for point in search.ask()])  # [2 R, D]
        with torch.inference_mode():
            losses = split.losses(torch.from_numpy(points), minibatches).double().numpy()
        differences = np.nan_to_num(losses[::2] - losses[1::2], nan=0.0, posinf=0.0, neginf=0.0)
        for search, difference in zip(going, differences, strict=True):
            search.tell(difference)
        progress(1)
        if curves.look(iteration, torch.from_numpy(np.stack([search.x for search in searches]))) and over:
            going = [search for search, done in zip(searches, over(curves), strict=True) if not done]
            if not going:
                break
    return curves


def run_subspaces(split: Split, *, cfg: Mapping[str, Any], seed: int) -> dict[str, dict[str, float]]:
    """Adam in random subspaces (SAID) by d', and with all weights as "full": best smoothed accuracy, lowest loss."""
    size, how = len(split.head.start), cfg["dimension"]
    dimensions = [size // 2**i for i in range(size.bit_length()) if size // 2**i >= how["smallest"]]
    rng = np.random.default_rng(streams(seed, "subspaces")["subspaces"])
    weights = [nn.Parameter(split.head.start.clone()) for _ in dimensions]
    subspaces = [
        said.Subspace({"weights": each}, layer_of=lambda _: "head", dimension=dimension, rng=rng)
        for each, dimension in zip(weights, dimensions, strict=True)
    ]
    full = nn.Parameter(split.head.start.clone())
    groups = [
        {"params": [subspace.z, subspace.scales], "lr": how["length"] / math.sqrt(dimension)}
        for subspace, dimension in zip(subspaces, dimensions, strict=True)
    ]
    optimizer = torch.optim.Adam([*groups, {"params": [full], "lr": how["length"] / math.sqrt(size)}])
    curves = Curves(split, how["iterations"], cfg["evaluation_growth"])
    for iteration in range(1, how["iterations"] + 1):
        for subspace in subspaces:
            subspace.write()
        optimizer.zero_grad()
        split.losses(torch.stack([*weights, full]), rng).sum().backward()  # type: ignore[no-untyped-call]
        for subspace in subspaces:
            subspace.pull_back()
        optimizer.step()
        curves.look(iteration, torch.stack([*weights, full]).detach())
    best = curves.smoothed(curves.accuracies, cfg["smoothing"]).max(0)
    lowest = curves.smoothed(curves.losses, cfg["smoothing"]).min(0)
    names = [*map(str, dimensions), "full"]
    return {name: {"accuracy": float(best[i]), "loss": float(lowest[i])} for i, name in enumerate(names)}


# ---------------------------------------------------------------------------------------------- hyperparameters


def candidates(cfg: Mapping[str, Any], size: int) -> dict[str, list[Row]]:
    """The hyperparameters to choose from, by method, for D tuned weights."""
    lengths = cfg["search"]["ncrs"]["length"]
    found: dict[str, list[Row]] = {"ncrs": [{"lr": float(length) / math.sqrt(size)} for length in lengths]}
    for method in ("mezo", "rsgf"):
        how = cfg["search"][method]
        found[method] = [{"lr": float(rate) / size, "mu": float(mu)} for rate in how["rate"] for mu in how["mu"]]
    return found


def rule(method: str, chosen: Row) -> Rule:
    """The rule of a search with these hyperparameters."""
    if method == "ncrs":
        return NCRS(step=chosen["lr"])
    return (MeZO if method == "mezo" else RSGF)(step=chosen["lr"], radius=chosen["mu"])


METHODS = ("ncrs", "mezo", "rsgf")


def tune(split: Split, *, cfg: Mapping[str, Any], seed: int, progress: Callable[[int], None]) -> Row:
    """The lowest smoothed validation loss of every method with every hyperparameter."""
    choices = candidates(cfg, len(split.head.start))
    pairs = [(method, choice) for method in METHODS for choice in choices[method]]
    how = {"iterations": cfg["search"]["tuning_iterations"], "growth": cfg["evaluation_growth"]}
    searches = run_searches(split, [rule(*pair) for pair in pairs], seed=seed, progress=progress, **how)
    losses = searches.smoothed(searches.losses, cfg["smoothing"]).min(0).tolist()
    return {"losses": [{"method": m, **c, "loss": loss} for (m, c), loss in zip(pairs, losses, strict=True)]}


def by_choice(tuned: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """The rows of all tuning seeds for each method with each of its hyperparameters."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in (row for each in tuned for row in each["losses"] if row["method"] in METHODS):
        found.setdefault((row["method"], str(row["lr"]), str(row.get("mu"))), []).append(row)
    return found


def hyperparameters(row: Row) -> Row:
    """Those of a row."""
    return {key: row[key] for key in ("lr", "mu") if key in row}


def finalists(tuned: Sequence[Row], count: int) -> list[tuple[str, Row]]:
    """So many hyperparameters of each method: those with the lowest loss, the mean over tuning seeds."""
    ordered = sorted(by_choice(tuned).values(), key=lambda rows: float(np.mean([row["loss"] for row in rows])))
    return [
        (method, hyperparameters(rows[0]))
        for method in METHODS
        for rows in [rows for rows in ordered if rows[0]["method"] == method][:count]
    ]


def select(
    split: Split,
    pairs: Sequence[tuple[str, Row]],
    *,
    cfg: Mapping[str, Any],
    seed: int,
    progress: Callable[[int], None],
) -> Row:
    """The iterations of each finalist to the target `loss`; all stop when one of every method is there."""
    goal = Goal(split, cfg=cfg, seed=seed)

    def over(curves: Curves) -> list[bool]:
        there = {method for (method, _), run in zip(pairs, goal.arrivals(curves), strict=True) if run["loss"]}
        return [there == set(METHODS)] * len(pairs)

    how = {"iterations": cfg["search"]["iterations"], "growth": cfg["evaluation_growth"], "over": over}
    searches = run_searches(split, [rule(*pair) for pair in pairs], seed=seed, progress=progress, **how)
    lowest = searches.smoothed(searches.losses, cfg["smoothing"]).min(0).tolist()
    rows = zip(pairs, goal.arrivals(searches), lowest, strict=True)
    return {
        "stopped": searches.iterations[-1],
        "losses": [{"method": m, **c, "iterations": run["loss"], "loss": loss} for (m, c), run, loss in rows],
    }


def choose(selected: Sequence[Row]) -> dict[str, Row]:
    """The hyperparameters with the fewest iterations, the geometric mean over tuning seeds, by method.

    A finalist that has not arrived counts as arriving when all stopped; among equals the lower loss decides.
    """
    selected = [
        {"losses": [{**row, "iterations": row["iterations"] or each["stopped"]} for row in each["losses"]]}
        for each in selected
    ]

    def rank(rows: Sequence[Row]) -> tuple[float, float]:
        return float(np.mean(np.log([row["iterations"] for row in rows]))), float(
            np.mean([row["loss"] for row in rows])
        )

    ordered = sorted(by_choice(selected).values(), key=rank, reverse=True)
    return {rows[0]["method"]: hyperparameters(rows[0]) for rows in ordered}  # the last of each method stays


class Goal:
    """What SGD reaches with one seed, and when others reach as much.

    SGD has the best of its learning rates for the seed, by the lowest smoothed loss.
    """

    def __init__(self, split: Split, *, cfg: Mapping[str, Any], seed: int) -> None:
        self.window, shares, rates = cfg["smoothing"], cfg["targets"], cfg["sgd"]["lr"]
        self.accuracy_iterations = cfg["search"]["accuracy_iterations"]
        self.start, self.start_loss = (float(each) for each in split.evaluate(split.head.start[None]))
        self.sgd = run_sgd(split, rates, cfg=cfg, seed=seed)
        losses = self.sgd.smoothed(self.sgd.losses, self.window).min(0)
        self.best = int(losses.argmin())
        self.rate, self.loss = float(rates[self.best]), float(losses[self.best])
        self.accuracy = float(self.sgd.smoothed(self.sgd.accuracies, self.window)[:, self.best].max())
        self.targets = {
            **{name: self.start_loss - shares[name] * (self.start_loss - self.loss) for name in ("half", "loss")},
            "gain": split.majority + shares["gain"] * (self.accuracy - split.majority),
            "best": float(
                np.max(np.array(self.sgd.accuracies)[:, self.best])
            ),  # the paper's: above SGD's best accuracy
        }

    def arrivals(self, curves: Curves) -> list[dict[str, int | None]]:
        """For each run the iterations until each target, None where it is not reached in time."""
        at, accuracies = np.array(curves.iterations), np.array(curves.accuracies)
        if len(at) < self.window:
            return [dict.fromkeys(self.targets) for _ in accuracies[0]]
        late = at[self.window - 1 :]  # when the smoothed ones are known
        steady, low = (curves.smoothed(each, self.window) for each in (curves.accuracies, curves.losses))

        def first(above: Any, when: Any, last: float = math.inf) -> int | None:
            above = above & (when <= last)
            return int(when[above.argmax()]) if above.any() else None

        return [
            {
                "half": first(low[:, run] <= self.targets["half"], late),
                "loss": first(low[:, run] <= self.targets["loss"], late),
                "gain": first(steady[:, run] >= self.targets["gain"], late, self.accuracy_iterations),
                "best": first(accuracies[:, run] > self.targets["best"], at, self.accuracy_iterations),
            }
            for run in range(steady.shape[1])
        ]


def measure(
    split: Split, chosen: Mapping[str, Row], *, cfg: Mapping[str, Any], seed: int, progress: Callable[[int], None]
) -> Row:
    """SGD, the subspaces for k, and the searches of one seed, each until it has reached what it can still reach."""
    window, goal = cfg["smoothing"], Goal(split, cfg=cfg, seed=seed)

    def over(curves: Curves) -> list[bool]:
        late = curves.iterations[-1] >= goal.accuracy_iterations
        wanted = ("half", "loss") if late else tuple(goal.targets)
        return [all(run[target] for target in wanted) for run in goal.arrivals(curves)]

    searches = run_searches(
        split,
        [rule(method, chosen[method]) for method in METHODS],
        iterations=cfg["search"]["iterations"],
        growth=cfg["evaluation_growth"],
        seed=seed,
        progress=progress,
        over=over,
    )
    reached, best = goal.arrivals(searches), int(np.argmax(np.array(goal.sgd.accuracies)[:, goal.best]))
    return {
        "accuracy_iterations": goal.accuracy_iterations, "majority": split.majority,
        "start": goal.start, "start_loss": goal.start_loss, "size": len(split.head.start),
        "targets": goal.targets, "subspaces": run_subspaces(split, cfg=cfg, seed=seed),
        "sgd": {
            **goal.arrivals(goal.sgd)[goal.best], "best": int(goal.sgd.iterations[best]), "accuracy": goal.accuracy,
            "lowest_loss": goal.loss, "lr": goal.rate,
        },
        "searches": {
            method: {
                **reached[run], "iterations": searches.iterations[-1], **chosen[method],
                "accuracy": float(searches.smoothed(searches.accuracies, window)[:, run].max()),
                "lowest_loss": float(searches.smoothed(searches.losses, window)[:, run].min()),
            }
            for run, method in enumerate(METHODS)
        },
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- the program


def pieces(chosen: Sequence[Setting], cfg: Mapping[str, Any]) -> Iterator[tuple[str, Setting, int]]:
    """What is to be done, in order: all settings with one seed before the next seed."""
    for stage, seeds in (("tune", cfg["tuning_seeds"]), ("select", cfg["tuning_seeds"]), ("measure", cfg["seeds"])):
        for seed, setting in itertools.product(seeds, chosen):
            yield stage, setting, seed


def path_of(root: Path, stage: str, setting: Setting, seed: int) -> Path:
    """The file of a piece."""
    return root / setting.name / f"{stage}_{seed}.json"


def find_missing(chosen: Sequence[Setting], cfg: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Why models cannot be used, such as a package that is not installed, by name."""
    missing = {}
    for model in sorted({setting.model for setting in chosen}):
        if model not in cfg["models"]:
            raise ConfigurationError(f"settings: unknown model {model!r}; known are {', '.join(cfg['models'])}")
        node = cfg["models"][model]
        try:
            pretrained.find(name=model, source=node["source"], path=node["path"], cache_folder=str(folder))
        except ConfigurationError as error:
            missing[model] = str(error)
    return missing


def states_of(setting: Setting, chosen: Sequence[Setting], cfg: Mapping[str, Any], folder: Path) -> Encoded:
    """The states of a setting, computed if they are not there yet; one pass through a network gives all its layers."""
    path = states_path(folder, setting.model, setting.layers, setting.new_layers)
    if not path.exists():
        network = (setting.model, setting.new_layers)
        layers = {each.layers for each in chosen if (each.model, each.new_layers) == network}
        encode(
            {**cfg["models"][setting.model], "max_tokens": cfg["max_tokens"]},
            all_examples(cfg["task"]),
            layers=[setting.layers] if setting.new_layers else sorted(layers),
            new_layers=setting.new_layers,
            batch_size=cfg["encoder_batch_size"],
            cache_folder=folder,
        )
    return load_states(path)


def run(cfg: Mapping[str, Any]) -> None:
    """Do every piece that is not there yet."""
    torch.set_num_threads(cfg["threads"])
    root, folder = Path(cfg["root"]), Path(cfg["root"]) / "states"
    chosen = settings(cfg["settings"])
    missing = find_missing(chosen, cfg, folder)
    for model, why in missing.items():
        left_out = sum(each.model == model for each in chosen)
        print(f"pbrl.finetune.study: {left_out} settings of {model} are left out: {why}", file=sys.stderr)
    chosen = [each for each in chosen if each.model not in missing]
    todo = [piece for piece in pieces(chosen, cfg) if not path_of(root, *piece).exists()]
    most = cfg["search"]["iterations"]
    work = {"tune": cfg["search"]["tuning_iterations"], "select": most, "measure": most}
    with tqdm(total=sum(work[stage] for stage, _, _ in todo), unit="it", mininterval=0.5) as bar:
        for stage, setting, seed in todo:
            bar.set_description(f"{setting.name}, {stage}, seed {seed}")
            before = bar.n
            split = build_split(setting, states_of(setting, chosen, cfg, folder), cfg, seed)
            how = {"cfg": cfg, "seed": seed, "progress": bar.update}

            def known(stage: str, of: Setting = setting) -> list[Row]:
                return [json.loads(path_of(root, stage, of, seed).read_text()) for seed in cfg["tuning_seeds"]]

            if stage == "tune":
                found = tune(split, **how)
            elif stage == "select":
                found = select(split, finalists(known("tune"), cfg["search"]["finalists"]), **how)
            else:
                found = measure(split, choose(known("select")), **how)
            path = path_of(root, stage, setting, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"setting": asdict(setting), "seed": seed, **found}) + "\n")
            bar.update(work[stage] - (bar.n - before))  # it may have ended early


@hydra.main(config_path="pkg://conf", config_name="finetune_study")
def main(cfg: DictConfig) -> None:
    """Run the study; errors that a user can mend become messages."""
    try:
        run(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    except (ConfigurationError, DataError) as error:
        raise SystemExit(f"pbrl.finetune.study: {error}") from None
    except OSError as error:
        raise SystemExit(f"pbrl.finetune.study: {error.strerror}: {error.filename}; what is done is kept") from None


if __name__ == "__main__":
    run_main(main, program="pbrl.finetune.study", config="finetune_study", groups=("task",), about=__doc__)
