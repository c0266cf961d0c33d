"""The weights of an encoder in an ONNX file, under the names that they have in `transformers`.

An exported file keeps the names of most weights, such as "model.0.auto_model.encoder.layer.0.output.dense.bias". The
matrix of a linear layer is transposed and loses its name; it is found by the bias that is added to its product.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from pbrl.run.settings import ConfigurationError


def read(path: Path) -> dict[str, Tensor]:
    """The weights of the embeddings and layers; the file is read as data, and nothing in it is computed."""
    try:
        import onnx
    except ImportError:
        raise ConfigurationError(f"{path} is an ONNX file, which takes a package to read: pip install onnx") from None
    try:
        graph = onnx.load(str(path), load_external_data=False).graph  # other files that it names are not opened
        arrays = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    except Exception as error:  # what is no ONNX file may raise anything
        raise ConfigurationError(f"{path} cannot be read as ONNX: {' '.join(str(error).split())[:200]}") from error
    arrays |= {  # equal weights are kept once, under one of their names
        node.output[0]: arrays[node.input[0]]
        for node in graph.node
        if node.op_type == "Identity" and node.input[0] in arrays
    }
    product_of = {
        node.output[0]: arrays[node.input[1]]
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in arrays
    }
    found = {}
    for node in graph.node:
        biases = [name for name in node.input if name in arrays and name.endswith(".bias")]
        matrices = [product_of[name] for name in node.input if name in product_of]
        if node.op_type == "Add" and biases and matrices:
            found[_plain(biases[0].removesuffix("bias") + "weight")] = matrices[0].T
    found |= {_plain(name): array for name, array in arrays.items() if re.search(r"\.(weight|bias)$", name)}
    return {
        name: torch.tensor(array) for name, array in found.items() if name.startswith(("embeddings.", "encoder.layer."))
    }


def _plain(name: str) -> str:
    """The name from `embeddings` or `encoder` on, without what the file puts before it."""
    return re.sub(r"^.*?(?=\b(embeddings|encoder)\.)", "", name)
