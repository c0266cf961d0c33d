"""Pre-trained encoders that classify whether two sentences mean the same.

BERT, RoBERTa and similar models, in three parts: lower layers that are frozen (so that their output can be computed
once), upper layers that are tuned, and a head that gives the scores of the two classes:

    masked   the model's own masked-LM head: "first {mask}, second" asks which of two words fills the gap (Gao, Fisch
             and Chen 2021; Malladi et al. 2023)
    cosine   for sentence encoders, likewise the task that they were trained on: the cosine between the mean states of
             the two sentences in "[CLS] first [SEP] second [SEP]"
    linear   a new linear layer on the state of the first token of the same input

Dropout is off for every method: the loss f_B depends on the weights and the minibatch B only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional

from pbrl.finetune.paraphrases import DataError, Example
from pbrl.run.settings import ConfigurationError
from pbrl.types import Float64


class Tokens(NamedTuple):
    """The tokens of one pair of sentences."""

    ids: Tensor  # [T] int64
    types: Tensor  # [T] int64, 1 for the second sentence; 0 everywhere in a prompt
    sentence: Tensor  # [T] int64, which of the two a token belongs to: 0, 1, or -1 for neither; 0 in a prompt
    place: int  # the position that a linear or masked head reads: the first token, or the gap


class Batch(NamedTuple):
    """B examples, padded to the longest of them."""

    ids: Tensor  # [B, T] int64
    types: Tensor  # [B, T] int64
    attend: Tensor  # [B, 1, 1, T] bool, false where there is padding
    sentence: Tensor  # [B, T] int64, -1 where there is padding
    place: Tensor  # [B] int64
    labels: Tensor  # [B] int64
    hidden: Tensor | None  # [B, T, width] the output of the frozen layers, if it is known


class States(NamedTuple):
    """B examples of which the head's input is known, because only the head is tuned."""

    states: Tensor  # [B, sentences or 1, width]
    labels: Tensor  # [B] int64


class CosineHead(nn.Module):
    """Sentences mean the same if their states u, v have a large cosine.

    score = slope * cos(gain u + shift, gain v + shift) + bias

    gain and shift are those of the encoder's last LayerNorm, moved to this head: applied after the mean over a
    sentence's tokens they give the same result at less cost. slope and bias come from logistic regression before
    tuning (`fit`) and are not tuned. So there are no new weights, and tuning starts from what the encoder knows, as
    with a prompt.
    """

    slope: Tensor
    bias: Tensor

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(norm.weight.detach().clone()), nn.Parameter(norm.bias.detach().clone())
        self.register_buffer("slope", torch.ones(1))
        self.register_buffer("bias", torch.zeros(1))

    def cosines(self, states: Tensor) -> Tensor:
        """The cosines [B] of pairs of states [B, 2, width]."""
        u, v = torch.addcmul(self.shift, states, self.gain).unbind(1)
        return functional.cosine_similarity(u, v)

    def forward(self, states: Tensor) -> Tensor:
        """The scores [B, 2] of the two classes, of which the first is 0."""
        score = self.slope * self.cosines(states) + self.bias
        return torch.stack([torch.zeros_like(score), score], 1)

    @torch.no_grad()
    def fit(self, states: Tensor, labels: Tensor) -> None:
        """Fit slope and bias to examples: states [n, 2, width], labels [n]."""
        cosines, y = (each.double().cpu().numpy() for each in (self.cosines(states), labels))
        mean, deviation = cosines.mean(), max(cosines.std(), 1e-6)  # all examples may be alike
        x = (cosines - mean) / deviation

        def loss(line: Float64) -> float:  # slightly penalised: on separable examples the slope would diverge
            score = line[0] * x + line[1]
            return float((np.logaddexp(0, score) - y * score).mean() + 1e-3 * line[0] ** 2)

        slope, level = minimize(loss, np.zeros(2), method="BFGS").x
        self.slope.fill_(slope / deviation)
        self.bias.fill_(level - slope * mean / deviation)


class LanguageModel(nn.Module):
    """An encoder and its head. `first_tuned`: the lowest tuned layer, len(layers) if only the head is tuned."""

    def __init__(
        self,
        embeddings: nn.Module,
        layers: Sequence[nn.Module],
        head: nn.Module,
        words: Sequence[int] | None,
        positions: nn.Module | None = None,  # number of tokens T -> what to add to attention scores [heads, T, T]
    ) -> None:
        super().__init__()
        self.embeddings, self.layers, self.head, self.words = embeddings, nn.ModuleList(layers), head, words
        self.positions = positions
        self.first_tuned, self.embeddings_tuned = 0, True

    def mask(self, attend: Tensor) -> Tensor:
        """What the layers take for `attend`: itself, or the positions' scores with -inf where there is padding."""
        if self.positions is None:
            return attend
        scores: Tensor = self.positions(attend.shape[-1])
        return scores.masked_fill(~attend, -torch.inf)

    def lower(self, ids: Tensor, types: Tensor, attend: Tensor) -> Tensor:
        """The output of the frozen layers: hidden states [B, T, width] below the first tuned layer."""
        kinds = {} if self.words is not None else {"token_type_ids": types}
        hidden: Tensor = self.embeddings(input_ids=ids, **kinds)
        mask = self.mask(attend)
        for layer in self.layers[: self.first_tuned]:
            hidden = layer(hidden, mask)
        return hidden

    @property
    def read(self) -> int:
        """The number of states of an example that the head reads."""
        return 2 if isinstance(self.head, CosineHead) else 1

    def states(self, batch: Batch) -> Tensor:
        """The head's input [B, read, width]: the means over the two sentences, or the state at one position."""
        hidden = self.lower(batch.ids, batch.types, batch.attend) if batch.hidden is None else batch.hidden
        upper, mask = self.layers[self.first_tuned :], self.mask(batch.attend)
        if isinstance(self.head, CosineHead):
            for layer in upper:
                hidden = layer(hidden, mask)
            belongs = torch.stack([batch.sentence == 0, batch.sentence == 1], 1).to(hidden.dtype)  # [B, 2, T]
            return belongs @ hidden / belongs.sum(2, keepdim=True).clamp_min(1)
        for layer in upper[:-1]:
            hidden = layer(hidden, mask)
        if len(upper):
            return at_place(upper[-1], hidden, mask, batch.place)[:, None]
        return hidden[torch.arange(len(batch.place)), batch.place][:, None]

    def forward(self, batch: Batch | States) -> Tensor:
        """The scores [B, 2] of the two classes."""
        states = batch.states if isinstance(batch, States) else self.states(batch)
        answer: Tensor = self.head(states if isinstance(self.head, CosineHead) else states[:, 0])
        return answer if self.words is None else answer[:, self.words]

    def loss(self, batch: Batch | States) -> Tensor:
        """f_B, the mean cross-entropy of the minibatch."""
        return functional.cross_entropy(self(batch), batch.labels)

    def tune(self, *, layers: int, embeddings: bool) -> dict[str, nn.Parameter]:
        """Choose what is tuned: the last layers, the head, perhaps the embeddings. Returns their parameters by name."""
        if not 0 <= layers <= len(self.layers):
            raise ConfigurationError(f"model.tuned_layers must be between 0 and {len(self.layers)}, not {layers}")
        if embeddings and layers < len(self.layers):
            raise ConfigurationError("model.tune_embeddings needs all layers above them tuned: model.tuned_layers")
        self.first_tuned, self.embeddings_tuned = len(self.layers) - layers, embeddings
        positions = () if self.positions is None else self.positions.parameters()
        below = () if embeddings else (*self.embeddings.parameters(), *positions)
        frozen = {id(p) for p in (*below, *self.layers[: self.first_tuned].parameters())}
        for parameter in self.parameters():  # a masked-LM head shares the word embeddings
            parameter.requires_grad_(id(parameter) not in frozen)
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def at_place(layer: Any, hidden: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    """A layer's output [B, width] at one position of each example, for hidden states [B, T, width].

    mask: as of `LanguageModel.mask`, [B, 1, 1, T] bool or [B, heads, T, T].

    The head reads one position only, so the last layer needs one query q for each example and attention head, and keys
    and values need not be computed: q (W x_t + b) = (q W) x_t + q b, where the last term is the same for all t; and a
    weighted mean of W x_t + b is W applied to the weighted mean of x_t, plus b.
    """
    attention = layer.attention.self
    heads, size, width = attention.num_attention_heads, attention.attention_head_size, hidden.shape[-1]
    here = hidden[torch.arange(len(place)), place]
    q = attention.query(here).view(-1, heads, size)
    query = torch.einsum("bhs,hsw->bhw", q, attention.key.weight.view(heads, size, width))
    scores = query @ hidden.transpose(1, 2) / size**0.5  # [B, heads, T]
    if mask.dtype == torch.bool:
        weights = scores.masked_fill(~mask[:, :, 0], -torch.inf).softmax(-1)
    else:
        weights = (scores + mask[torch.arange(len(place)), :, place]).softmax(-1)
    mean = weights @ hidden  # [B, heads, width]
    values = torch.einsum("bhw,hsw->bhs", mean, attention.value.weight.view(heads, size, width))
    context = values.flatten(1) + attention.value.bias
    state = layer.attention.output.LayerNorm(layer.attention.output.dense(context) + here)
    inner = layer.intermediate(state)
    return layer.output.LayerNorm(layer.output.dense(inner) + state)  # type: ignore[no-any-return]


class Reader:
    """Turns examples into tokens."""

    def __init__(self, tokenizer: Any, *, template: str | None, max_tokens: int) -> None:
        self.tokenizer, self.template, self.max_tokens = tokenizer, template, max_tokens

    def __call__(self, example: Example) -> Tokens:
        """The tokens of a pair; sentences that are too long are truncated."""
        if self.template is None:
            found = self.tokenizer(example.first, example.second, truncation=True, max_length=self.max_tokens)
            ids = torch.tensor(found["input_ids"])
            sentence = torch.tensor([-1 if which is None else which for which in found.sequence_ids()])
            return Tokens(ids, torch.tensor(found.get("token_type_ids", [0] * len(ids))), sentence, 0)
        first, second = example.first.split(), example.second.split()
        while True:
            words = {"first": " ".join(first), "second": " ".join(second), "mask": self.tokenizer.mask_token}
            ids = torch.tensor(self.tokenizer(self.template.format(**words))["input_ids"])
            if len(ids) <= self.max_tokens or len(first) + len(second) <= 2:
                break
            (first if len(first) > len(second) else second).pop()
        places = (ids == self.tokenizer.mask_token_id).nonzero().flatten()
        if len(places) != 1:
            raise DataError(f"a prompt must have one {words['mask']}, not {len(places)}: {example}")
        return Tokens(ids, torch.zeros_like(ids), torch.zeros_like(ids), int(places[0]))


def pad(tokens: Sequence[Tokens], labels: Tensor, hidden: Sequence[Tensor] | None) -> Batch:
    """Make a batch of examples, padded to the longest."""
    lengths = torch.tensor([len(each.ids) for each in tokens])

    def together(rows: Sequence[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    ids, types = together([each.ids for each in tokens]), together([each.types for each in tokens])
    attend = (torch.arange(ids.shape[1]) < lengths[:, None])[:, None, None]
    sentence = nn.utils.rnn.pad_sequence([each.sentence for each in tokens], batch_first=True, padding_value=-1)
    place = torch.tensor([each.place for each in tokens])
    return Batch(ids, types, attend, sentence, place, labels, None if hidden is None else together(hidden))


def by_length(tokens: Sequence[Tokens], size: int) -> list[np.ndarray[Any, Any]]:
    """Indices of examples in batches of similar length."""
    order = np.argsort([len(each.ids) for each in tokens], kind="stable")
    return [order[begin : begin + size] for begin in range(0, len(order), size)]
