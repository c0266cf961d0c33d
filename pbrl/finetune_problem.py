"""One setting of the fine-tuning experiment: a model, what of it is tuned, and the data it is tuned on.

Everything that tunes or measures a model speaks to `Problem`: the optimisers of `pbrl.finetune`, its benchmark, and
the measurement of intrinsic dimension.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from pbrl import language, paraphrases
from pbrl.language import Batch, LanguageModel, Reader, Tokens
from pbrl.paraphrases import Data, Example
from pbrl.types import Float32

GIB = 2**30


class Problem:
    """A model before its data.

    What is below the first tuned layer never changes. Its output for every example is computed once and kept on disk,
    for all runs that share it, if it takes no more than `cache_gib`; else it is computed for each minibatch.
    """

    model: LanguageModel
    tuned: dict[str, nn.Parameter]  # by name: embeddings..., layers.0..., head...

    def __init__(
        self,
        model: LanguageModel,
        reader: Reader,
        data: Data,
        *,
        tuned_layers: int,
        tune_embeddings: bool,
        batch_size: int,
        evaluation_batch_size: int,
        cache_gib: float,
        cache_folder: str,
        device: str,
        seed: int,
    ) -> None:
        self.model, self.data, self.device = model.to(device), data, device
        self.tuned = model.tune(layers=tuned_layers, embeddings=tune_embeddings)
        self.batch_size, self.seed = batch_size, seed
        if batch_size > len(data.training):
            raise paraphrases.DataError(f"batch_size={batch_size} is more than the {len(data.training)} to train on")
        self._training = _Encoded(reader, data.training)
        self._validation = _Encoded(reader, data.validation)
        self._rows = language.by_length(self._validation.tokens, evaluation_batch_size)
        width = int(model.layers[0].output.dense.out_features)  # type: ignore[union-attr,arg-type]
        needed = sum(part.ends[-1] for part in (self._training, self._validation)) * width * 4  # bytes
        self.cached = not tune_embeddings and needed <= cache_gib * GIB
        if self.cached:
            for part in (self._training, self._validation):
                part.hidden = self._lower_of(part, width, evaluation_batch_size, Path(cache_folder))

    def batch(self, iteration: int) -> Batch:
        """The minibatch of an iteration: drawn without replacement, from the seed and the iteration alone."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, iteration]))
        return self._gather(self._training, rng.choice(len(self._training.tokens), self.batch_size, replace=False))

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The minibatches from an iteration on, without end."""
        while True:
            yield self.batch(start)
            start += 1

    def loss(self, batch: Batch) -> Tensor:
        """f_B, a scalar that can be differentiated."""
        return self.model.loss(batch)

    def accuracy(self) -> float:
        """On the validation set."""
        return self.evaluate()[0]

    @torch.inference_mode()
    def evaluate(self) -> tuple[float, float]:
        """Accuracy and mean cross-entropy on the validation set."""
        right = loss = 0.0
        for rows in self._rows:
            batch = self._gather(self._validation, rows)
            scores = self.model(batch)
            right += float((scores.argmax(1) == batch.labels).sum())
            loss += float(nn.functional.cross_entropy(scores, batch.labels, reduction="sum"))
        return right / len(self._validation.tokens), loss / len(self._validation.tokens)

    @torch.no_grad()
    def _gather(self, part: _Encoded, rows: Sequence[int] | np.ndarray[Any, Any]) -> Batch:
        hidden = None if part.hidden is None else [torch.tensor(part.hidden[part.span(i)]) for i in rows]
        batch = language.pad([part.tokens[i] for i in rows], part.labels[torch.as_tensor(rows)], hidden)
        batch = Batch(*(None if each is None else each.to(self.device) for each in batch))  # type: ignore[arg-type]
        if batch.hidden is None and not self.model.embeddings_tuned:  # both evaluations of an iteration share it
            batch = batch._replace(hidden=self.model.lower(batch.ids, batch.types, batch.attend))
        return batch

    def _lower_of(self, part: _Encoded, width: int, size: int, folder: Path) -> Float32:
        """The lower part's output for all examples, [tokens, width], in a file that all runs share."""
        path = folder / f"{self._digest(part)}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            hidden = np.lib.format.open_memmap(unfinished, "w+", np.float32, (int(part.ends[-1]), width))
            for rows in tqdm(language.by_length(part.tokens, size), desc="what is not tuned, once", leave=False):
                for i, states in zip(rows, self._gather(part, rows).hidden.cpu().numpy(), strict=True):  # type: ignore[union-attr]
                    hidden[part.span(i)] = states[: len(part.tokens[i].ids)]
            hidden.flush()
            unfinished.replace(path)
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]

    def _digest(self, part: _Encoded) -> str:
        """Of all that the lower part's output depends on."""
        digest = hashlib.sha256()
        below = (self.model.embeddings, *self.model.layers[: self.model.first_tuned])
        for tensor in (tensor for module in below for tensor in module.state_dict().values()):
            digest.update(tensor.cpu().numpy().tobytes())
        for tokens in part.tokens:
            digest.update(tokens.ids.numpy().tobytes() + tokens.types.numpy().tobytes())
        return digest.hexdigest()[:32]


class _Encoded:
    """Examples as the model reads them."""

    def __init__(self, reader: Callable[[Example], Tokens], examples: Sequence[Example]) -> None:
        self.tokens = [reader(example) for example in examples]
        self.labels = torch.tensor([example.label for example in examples])
        self.ends = np.cumsum([len(each.ids) for each in self.tokens])
        self.hidden: Float32 | None = None  # [tokens, width] one example after the other, where it is known

    def span(self, i: int) -> slice:
        """The rows of an example."""
        return slice(int(self.ends[i]) - len(self.tokens[i].ids), int(self.ends[i]))


def build(
    *,
    model: Mapping[str, Any],
    task: Mapping[str, Any],
    batch_size: int,
    evaluation_batch_size: int,
    cache_gib: float,
    cache_folder: str,
    device: str,
    seed: int,
) -> Problem:
    """The problem of a setting, from the nodes `model` and `task` of the configuration.

    The seed makes the new weights and the order of minibatches. Which examples are put aside and kept does not depend
    on it, so that all runs of a setting are judged alike.
    """
    weights, order = np.random.SeedSequence(seed).generate_state(2)
    tuned = {"tuned_layers": model["tuned_layers"], "tune_embeddings": model["tune_embeddings"]}
    loaded, reader = language.load(**{k: v for k, v in model.items() if k not in tuned}, seed=int(weights))
    data = paraphrases.load(**task, rng=np.random.default_rng(0))
    return Problem(
        loaded,
        reader,
        data,
        **tuned,
        batch_size=batch_size,
        evaluation_batch_size=evaluation_batch_size,
        cache_gib=cache_gib,
        cache_folder=cache_folder,
        device=device,
        seed=int(order),
    )
