"""Tiny encoders with random weights and a vocabulary of their own, saved as a hub would have them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pbrl.finetune import problem as finetune_problem

WORDS = ["yes", "no", "cat", "dog", "sat", "ran", "the", "a", "mat", "home", ","]
SPECIAL = {
    "bert": ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"),
    "roberta": ("<pad>", "<s>", "</s>", "<mask>", "<unk>"),
    "mpnet": ("<s>", "<pad>", "</s>", "<mask>", "<unk>"),  # its code takes 1 for padding
}
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
# Weights large enough for the loss to depend on them.
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.3}


def save(folder: Path, kind: str, *, masked: bool = True) -> Path:
    """A BERT, RoBERTa or MPNet in a folder, with its masked-LM head or without."""
    first, second, end, mask, unknown = SPECIAL[kind]
    pad, begin = (second, first) if kind == "mpnet" else (first, second)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL[kind], *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(",", "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, vocabulary[begin]), (end, vocabulary[end])],
    )
    names = {"pad_token": pad, "cls_token": begin, "sep_token": end, "mask_token": mask, "unk_token": unknown}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    settings: dict[str, Any] = {"vocab_size": len(vocabulary), "pad_token_id": vocabulary[pad], **SIZES}
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(**settings)
        model = transformers.BertForMaskedLM(config) if masked else transformers.BertModel(config)
    elif kind == "mpnet":
        config = transformers.MPNetConfig(**settings)
        model = transformers.MPNetForMaskedLM(config) if masked else transformers.MPNetModel(config)
    else:
        model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(type_vocab_size=1, **settings))
    model.save_pretrained(folder)
    return folder


def save_onnx(path: Path, model: Any) -> Path:
    """The encoder of a BERT as an ONNX file, exported with the names that sentence encoders are published with."""

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.auto_model = model

        def forward(self, ids: torch.Tensor, types: torch.Tensor, attend: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.auto_model.embeddings(input_ids=ids, token_type_ids=types)
            for layer in self.auto_model.encoder.layer:
                hidden = layer(hidden, attend)
            return hidden

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and LayerNorms, of which all are alike at first
            parameter += 0.1 * torch.randn_like(parameter)
    tokens = torch.ones(2, 7, dtype=torch.long)
    example = (tokens, tokens, torch.ones(2, 1, 1, 7, dtype=torch.bool))
    axes = {"ids": {1: "T"}, "types": {1: "T"}, "attend": {3: "T"}}
    with warnings.catch_warnings():  # the exporter that such files were made with is an old one
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Exported().eval(), example, path, dynamo=False, input_names=list(axes), dynamic_axes=axes
        )  # fmt: skip
    return path


def write_data(path: Path, examples: int = 60) -> Path:
    """Sentences in Microsoft's format; with a cat in the second, they count as paraphrases."""
    rng = np.random.default_rng(0)
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for i in range(examples):
        one, other = rng.choice(["cat", "dog"], 2)
        verb, place = rng.choice(["sat", "ran"]), rng.choice(["home", "a mat", "the mat"])
        lines.append(f"{int(other == 'cat')}\t{i}\t{i}\tthe {one} {verb} {place}\ta {other} {verb}")
    path.write_text("\n".join(lines) + "\n")
    return path


def problem(folder: Path, **changes: Any) -> finetune_problem.Problem:
    """A tiny BERT with a new head before such data, all of it tuned unless said otherwise."""
    torch.set_num_threads(1)  # they would wait for each other at every tiny operation
    if not (folder / "model").exists():
        save(folder / "model", "bert")
        write_data(folder / "data.tsv")
    model: dict[str, Any] = {
        "name": "tiny", "source": "hub:none", "path": str(folder / "model"), "like": None, "layers": 3, "new_layers": 0,
        "tuned_layers": 3, "tune_embeddings": False, "head": "linear", "template": None, "words": None,
        "max_tokens": 32,
    }  # fmt: skip
    task: dict[str, Any] = {
        "name": "mrpc", "path": str(folder / "data.tsv"), "hub_name": "", "hub_configuration": "", "share": 1.0,
        "validation": 12, "malformed": "error",
    }  # fmt: skip
    rest: dict[str, Any] = {
        "head_examples": 32, "batch_size": 8, "evaluation_batch_size": 5, "cache_gib": 1.0,
        "cache_folder": str(folder / "cache"),
        "device": "cpu", "seed": 0,
    }  # fmt: skip
    for part in (model, task, rest):
        part |= {key: value for key, value in changes.items() if key in part}
    return finetune_problem.build(model=model, task=task, **rest)
