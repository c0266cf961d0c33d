"""MPNet (Song et al. 2020) in the layers of BERT, with its relative positions beside them.

A layer of MPNet is one of BERT whose attention scores get a term that depends on how far apart two tokens are. All
layers share these terms: one number for each attention head and each range of distances. BERT's layers take such terms
in place of a mask, so they compute what MPNet's own do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

RENAMED = {
    "attention.attn.q.": "attention.self.query.",
    "attention.attn.k.": "attention.self.key.",
    "attention.attn.v.": "attention.self.value.",
    "attention.attn.o.": "attention.output.dense.",
    "attention.LayerNorm.": "attention.output.LayerNorm.",
}


class RelativePositions(nn.Module):
    """What MPNet adds to the attention scores of T tokens: [heads, T, T], by how far the key is from the query."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.terms, self.bucket = encoder.relative_attention_bias, encoder.relative_position_bucket

    def forward(self, tokens: int) -> Tensor:
        """For a number of tokens."""
        place = torch.arange(tokens, device=self.terms.weight.device)
        ranges = self.bucket(place - place[:, None], num_buckets=self.terms.num_embeddings)
        return self.terms(ranges).permute(2, 0, 1)  # type: ignore[no-any-return]


def as_bert(model: Any) -> tuple[Sequence[nn.Module], RelativePositions]:
    """The layers of an MPNet of `transformers` as layers of BERT, and their relative positions."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    same = ("hidden_size", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps")
    config = BertConfig(**{key: getattr(model.config, key) for key in same}, attn_implementation="sdpa")
    layers = []
    for theirs in model.encoder.layer:
        ours = BertLayer(config)
        ours.load_state_dict({_renamed(name): weights for name, weights in theirs.state_dict().items()})
        layers.append(ours)
    return layers, RelativePositions(model.encoder)


def _renamed(name: str) -> str:
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name
