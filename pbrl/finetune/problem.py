"""One setting of the fine-tuning experiment: a model, its tuned part, and its data.

Everything that tunes or measures a model uses `Problem`: the methods of `pbrl.finetune`, its benchmark, and the
measurement of the intrinsic dimension.
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

from pbrl.finetune import language, paraphrases, pretrained
from pbrl.finetune.language import Batch, CosineHead, LanguageModel, Reader, States, Tokens
from pbrl.finetune.paraphrases import Data, Example
from pbrl.run.terminal import ProgressBar
from pbrl.seeds import as_number, streams
from pbrl.types import Float32

GIB = 2**30


class Problem:
    """A model and the data that it is tuned on.

    The layers below the first tuned one never change. Their output for every example is computed once and cached on
    disk for all runs that share it, if it takes no more than `cache_gib`; else it is computed for each minibatch. If
    only the head is tuned, only the states that the head reads are cached.
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
        head_examples: int,  # to which a cosine head is fitted before tuning
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
            raise paraphrases.DataError(
                f"batch_size={batch_size} is more than the {len(data.training)} training examples"
            )
        rows = model.read if model.first_tuned == len(model.layers) else None
        self._training = _Encoded(reader, data.training, rows)
        self._validation = _Encoded(reader, data.validation, rows)
        self._order = language.by_length(self._validation.tokens, evaluation_batch_size)
        width = int(model.layers[0].output.dense.out_features)  # type: ignore[union-attr,arg-type]
        needed = sum(part.ends[-1] for part in (self._training, self._validation)) * width * 4  # bytes
        self.cached = not tune_embeddings and needed <= cache_gib * GIB
        if self.cached:
            for part in (self._training, self._validation):
                part.known = self._lower_of(part, width, evaluation_batch_size, Path(cache_folder))
        if isinstance(model.head, CosineHead):
            self._fit(model.head, min(head_examples, len(data.training)), evaluation_batch_size)

    @torch.inference_mode()
    def _fit(self, head: CosineHead, examples: int, size: int) -> None:
        """Fit the head to the first examples."""
        batches = [
            self._gather(self._training, np.arange(begin, min(begin + size, examples)))
            for begin in range(0, examples, size)
        ]
        states = [b.states if isinstance(b, States) else self.model.states(b) for b in batches]
        head.fit(torch.cat(states), torch.cat([batch.labels for batch in batches]))

    def batch(self, iteration: int) -> Batch | States:
        """The minibatch of an iteration: drawn without replacement, depending on the seed and the iteration only."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, iteration]))
        return self._gather(self._training, rng.choice(len(self._training.tokens), self.batch_size, replace=False))

    def batches(self, start: int = 0) -> Iterator[Batch | States]:
        """The minibatches from an iteration on, endlessly."""
        while True:
            yield self.batch(start)
            start += 1

    def loss(self, batch: Batch | States) -> Tensor:
        """f_B, a scalar that can be differentiated."""
        return self.model.loss(batch)

    def accuracy(self) -> float:
        """Accuracy on the validation set."""
        return self.evaluate()[0]

    @torch.inference_mode()
    def evaluate(self) -> tuple[float, float]:
        """Accuracy and mean cross-entropy on the validation set."""
        right = loss = 0.0
        for rows in self._order:
            batch = self._gather(self._validation, rows)
            scores = self.model(batch)
            right += float((scores.argmax(1) == batch.labels).sum())
            loss += float(nn.functional.cross_entropy(scores, batch.labels, reduction="sum"))
        return right / len(self._validation.tokens), loss / len(self._validation.tokens)

    @torch.no_grad()
    def _gather(self, part: _Encoded, rows: np.ndarray[Any, Any]) -> Batch | States:
        labels = part.labels[torch.as_tensor(rows)]
        if part.known is not None and part.rows is not None:
            states = torch.from_numpy(part.known.reshape(len(part.tokens), part.rows, -1)[rows])
            return States(states.to(self.device), labels.to(self.device))
        hidden = None if part.known is None else [torch.tensor(part.known[part.span(i)]) for i in rows]
        batch = language.pad([part.tokens[i] for i in rows], labels, hidden)
        batch = Batch(*(None if each is None else each.to(self.device) for each in batch))  # type: ignore[arg-type]
        if batch.hidden is None and not self.model.embeddings_tuned:  # both evaluations of an iteration share it
            batch = batch._replace(hidden=self.model.lower(batch.ids, batch.types, batch.attend))
        return batch

    @torch.no_grad()
    def _lower_of(self, part: _Encoded, width: int, size: int, folder: Path) -> Float32:
        """The output of the frozen layers for all examples, [rows, width], in a file that all runs share."""
        path = folder / f"{self._digest(part)}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            known = np.lib.format.open_memmap(unfinished, "w+", np.float32, (int(part.ends[-1]), width))
            for rows in ProgressBar(
                language.by_length(part.tokens, size), desc="output of the frozen layers", leave=False
            ):
                batch = self._gather(part, rows)
                assert isinstance(batch, Batch)
                output = batch.hidden if part.rows is None else self.model.states(batch)
                for i, states in zip(rows, output.cpu().numpy(), strict=True):  # type: ignore[union-attr]
                    span = part.span(i)
                    known[span] = states[: span.stop - span.start]
            known.flush()
            unfinished.replace(path)
        return np.load(path, mmap_mode="r" if part.rows is None else None)  # type: ignore[no-any-return]

    def _digest(self, part: _Encoded) -> str:
        """A hash of everything that the output of the frozen layers depends on."""
        digest = hashlib.sha256()
        positions = () if self.model.positions is None else (self.model.positions,)
        below = (self.model.embeddings, *positions, *self.model.layers[: self.model.first_tuned])
        for tensor in (tensor for module in below for tensor in module.state_dict().values()):
            digest.update(tensor.cpu().numpy().tobytes())
        for tokens in part.tokens:
            digest.update(tokens.ids.numpy().tobytes() + tokens.types.numpy().tobytes())
            if part.rows is not None:  # and the positions that the head reads
                digest.update(tokens.sentence.numpy().tobytes() if part.rows == 2 else tokens.place.to_bytes(4))
        return digest.hexdigest()[:32]


class _Encoded:
    """The tokens of examples, and the output of the frozen layers for them."""

    def __init__(self, reader: Callable[[Example], Tokens], examples: Sequence[Example], rows: int | None) -> None:
        self.tokens = [reader(example) for example in examples]
        self.labels = torch.tensor([example.label for example in examples])
        self.rows = rows  # per example in `known`: as many as the head reads; None: one per token
        self.ends = np.cumsum([rows or len(each.ids) for each in self.tokens])
        self.known: Float32 | None = None  # [rows, width] one example after the other

    def span(self, i: int) -> slice:
        """The rows of an example."""
        return slice(int(self.ends[i]) - (self.rows or len(self.tokens[i].ids)), int(self.ends[i]))


def build(
    *,
    model: Mapping[str, Any],
    task: Mapping[str, Any],
    head_examples: int,
    batch_size: int,
    evaluation_batch_size: int,
    cache_gib: float,
    cache_folder: str,
    device: str,
    seed: int,
) -> Problem:
    """The problem of a setting, from the nodes `model` and `task` of the configuration.

    The new weights and the minibatches depend on the seed. The split into training and validation examples does not, so
    that all runs of a setting are evaluated on the same examples.
    """
    stream = streams(seed, "weights", "minibatches")
    tuned = {"tuned_layers": model["tuned_layers"], "tune_embeddings": model["tune_embeddings"]}
    loaded, reader = pretrained.load(
        **{k: v for k, v in model.items() if k not in tuned},
        cache_folder=cache_folder,
        seed=as_number(stream["weights"]),
    )
    data = paraphrases.load(**task, rng=np.random.default_rng(0))
    return Problem(
        loaded,
        reader,
        data,
        **tuned,
        head_examples=head_examples,
        batch_size=batch_size,
        evaluation_batch_size=evaluation_batch_size,
        cache_gib=cache_gib,
        cache_folder=cache_folder,
        device=device,
        seed=as_number(stream["minibatches"]),
    )
