"""One setting of the fine-tuning experiment: a model, what of it is tuned, and the data it is tuned on.

Everything that tunes or measures a model speaks to `Problem`: the optimisers of `pbrl.finetune`, its benchmark, and
the measurement of intrinsic dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pbrl import language, paraphrases
from pbrl.language import Batch, LanguageModel, Reader, Tokens
from pbrl.paraphrases import Data, Example

GIB = 2**30


class Problem:
    """A model before its data.

    What is below the first tuned layer never changes. Its output for every example is computed once and kept if it
    takes no more than `cache_gib`, else for each minibatch.
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
        tokens = sum(len(each.ids) for part in (self._training, self._validation) for each in part.tokens)
        width = model.layers[0].output.dense.out_features  # type: ignore[union-attr]
        self.cached = not tune_embeddings and tokens * width * 4 <= cache_gib * GIB
        if self.cached:
            for part in (self._training, self._validation):
                self._compute_lower(part, evaluation_batch_size)

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
        hidden = None if part.hidden is None else [part.hidden[i] for i in rows]
        batch = language.pad([part.tokens[i] for i in rows], part.labels[torch.as_tensor(rows)], hidden)
        batch = Batch(*(None if each is None else each.to(self.device) for each in batch))  # type: ignore[arg-type]
        if batch.hidden is None and not self.model.embeddings_tuned:  # both evaluations of an iteration share it
            batch = batch._replace(hidden=self.model.lower(batch.ids, batch.types, batch.attend))
        return batch

    def _compute_lower(self, part: _Encoded, size: int) -> None:
        hidden: list[Tensor | None] = [None] * len(part.tokens)
        for rows in language.by_length(part.tokens, size):
            batch = self._gather(part, rows)
            assert batch.hidden is not None
            for i, states in zip(rows, batch.hidden.cpu(), strict=True):
                hidden[i] = states[: len(part.tokens[i].ids)].clone()
        part.hidden = hidden  # type: ignore[assignment]


class _Encoded:
    """Examples as the model reads them."""

    def __init__(self, reader: Callable[[Example], Tokens], examples: Sequence[Example]) -> None:
        self.tokens = [reader(example) for example in examples]
        self.labels = torch.tensor([example.label for example in examples])
        self.hidden: list[Tensor] | None = None  # [T, width] of each, where it is known


def build(
    *,
    model: Mapping[str, Any],
    task: Mapping[str, Any],
    batch_size: int,
    evaluation_batch_size: int,
    cache_gib: float,
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
        device=device,
        seed=int(order),
    )
