"""A model's files that are broken end in an error that names the file and what is wrong in it."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer
from tokenizers import models as token_models

from tests.worker.test_loading import write_gguf
from tests.worker.tiny_models import CPU, random_model, write_folder
from worker.loading import load_config, load_model
from worker.loading.tokenizer import load_tokenizer
from worker.models.config import ModelError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(random_model("llama"), tmp_path_factory.mktemp("whole"))
    Tokenizer(token_models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def folder(whole_folder: Path, tmp_path: Path) -> Path:
    for file in whole_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def rewrite(file: Path, changes: dict[str, Any], *, drop: str | None = None) -> None:
    content = json.loads(file.read_text()) | changes
    content.pop(drop, None)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_configuration_without_a_size_is_refused_by_the_name_of_the_size(folder: Path, key: str) -> None:
    rewrite(folder / "config.json", {}, drop=key)
    with pytest.raises(ModelError, match=f"{folder.name}.*config.json lacks '{key}'"):
        load_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "48"}, r"'hidden_size' is '48', not a number"),
        ({"hidden_size": 48.5}, r"'hidden_size' is 48.5, not a whole number"),
        ({"num_attention_heads": 0}, r"'num_attention_heads' is 0, not a whole number above 0"),
        ({"vocab_size": True}, r"'vocab_size' is True, not a number"),
        ({"rms_norm_eps": []}, r"'rms_norm_eps' is \[\], not a number"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"lacks 'factor'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, r"'factor' is '4', not a number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, r"factor 0 makes no sense"),
        ({"rope_parameters": ["yarn"]}, r"the RoPE scaling is \['yarn'\], not an object"),
        ({"architectures": "LlamaModel"}, r"architecture 'LlamaModel' is not supported"),
        ({"quantization_config": "awq"}, r"quantised weights \(awq\)"),
        ({"eos_token_id": ["2"]}, r"'2' stands where a token id should"),
    ],
)
def test_a_configuration_with_a_wrong_value_is_refused_by_its_name(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(folder / "config.json", changes)
    with pytest.raises(ModelError, match=message):
        load_config(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [('{"a": ', "is not JSON"), ("[1, 2]", "holds no JSON object but a list"), (POINTER, "pointer of Git LFS")],
)
def test_a_file_that_is_no_json_object_is_named(folder: Path, file: str, content: str, message: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=rf"{file} .*{message}"):
        load_tokenizer(folder)


def test_sampling_defaults_that_are_no_numbers_are_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": "0.7"}')
    with pytest.raises(ModelError, match=r"generation_config.json: 'temperature' is '0.7', not a number"):
        load_config(folder)


def test_a_tokenizer_that_the_library_cannot_read_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "Oracle"}}')
    with pytest.raises(ModelError, match=r"cannot be built from its tokenizer\.json"):
        load_tokenizer(folder).tokenizer()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_a_weight_file_that_ends_early_is_named(folder: Path, share: float) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=r"model\.safetensors is no whole safetensors file: "):
        load_model(folder, dtype="float32", device=CPU)


def test_a_weight_file_whose_content_was_not_fetched_says_how_to_fetch_it(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)
    with pytest.raises(ModelError, match=r"model\.safetensors .*git lfs pull"):
        load_model(folder, dtype="float32", device=CPU)


@pytest.mark.parametrize("index", [{"metadata": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map_of_weights_is_named(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index\.json has no 'weight_map'"):
        load_model(folder, dtype="float32", device=CPU)


def test_one_whole_weight_file_is_read_alone_whatever_lies_beside_it(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_text("the same weights in another layout")
    wanted = load_model(folder, dtype="float32", device=CPU).weights.keys()
    assert "model.norm.weight" in wanted


def test_a_gguf_file_that_is_cut_or_scribbled_over_is_refused_and_never_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model("llama", num_hidden_layers=1), gguf.GGMLQuantizationType.F32)
    whole, rng = path.read_bytes(), random.Random(3)
    header = whole.index(b"blk.0.ffn_down.weight") + 100  # what comes behind is numbers: any will do
    load_model(path, dtype="float32", device=CPU)
    for attempt in range(150):
        broken = bytearray(whole)
        if attempt % 3:
            for _ in range(attempt % 3):
                broken[rng.randrange(header)] = rng.randrange(256)
        else:
            del broken[rng.randrange(len(whole) - 64) :]
        broken_path = tmp_path / f"{attempt}.gguf"
        broken_path.write_bytes(broken)
        try:
            load_model(broken_path, dtype="float32", device=CPU)
        except ModelError as error:
            assert str(error)
        else:
            assert attempt % 3, "a file that was cut has lost something"
        broken_path.unlink()
