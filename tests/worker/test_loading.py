"""Checkpoints on disk become the right weights, configuration and tokenizer, or an error that says why not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as token_models

from tests.worker.tiny_models import (
    CPU,
    golden_texts,
    greedy_text,
    logits_of,
    random_model,
    runner_of,
    shape_of_smollm2,
    write_folder,
)
from worker.loading import default_model_path, load_config, load_model, model_fingerprint
from worker.loading.gguf_file import checkpoint_name
from worker.loading.huggingface import parse_config
from worker.loading.tokenizer import load_tokenizer
from worker.models.config import ModelError

PROMPT = [(index * 17 + 5) % 301 for index in range(30)]


def test_the_packaged_model_is_smollm2() -> None:
    config = load_config(default_model_path())
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_context) == (64, 49152, 8192)
    assert (config.rope.theta, config.tie_word_embeddings, config.eos_token_ids) == (100_000, True, (2, 0))
    assert config.kv_bytes_per_token(2) == 23_040


def test_weights_of_the_packaged_model_equal_transformers_own_reading() -> None:
    from transformers import LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = default_model_path()
    with torch.device("meta"):
        shape = LlamaForCausalLM(shape_of_smollm2())
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shape)["tensors"]
    ours = load_model(path, dtype="float32", device=CPU).weights
    assert len(ours) == 272
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_the_tokenizer_of_the_packaged_model_gives_the_golden_ids() -> None:
    files = load_tokenizer(default_model_path())
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    for one in golden_texts():
        assert tokenizer.encode(one["text"], add_special_tokens=False).ids == one["token_ids"], one["text"]
        assert tokenizer.decode(one["token_ids"], skip_special_tokens=False) == one["text"]
    assert (files.bos_token, files.eos_token, files.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert files.eos_token_ids == (2, 0)
    assert "add_generation_prompt" in (files.chat_template or "")


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    write_folder(random_model("llama"), tmp_path)
    seen: list[tuple[int, int]] = []
    loaded = load_model(tmp_path, dtype="float32", device=CPU, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(index, len(loaded.weights)) for index in range(1, len(loaded.weights) + 1)]
    assert loaded.weight_bytes == sum(weight.numel() * 4 for weight in loaded.weights.values())


def test_sharded_folders_are_read_whole_and_a_lost_shard_is_named(tmp_path: Path) -> None:
    model = random_model("llama")
    write_folder(model, tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    wanted = model(torch.tensor([PROMPT])).logits[0].detach()
    torch.testing.assert_close(logits_of(runner_of(tmp_path), PROMPT), wanted, atol=1e-4, rtol=0)
    shards[0].unlink()
    with pytest.raises(ModelError, match=shards[0].name):
        load_model(tmp_path, dtype="float32", device=CPU)


def test_dtype_auto_is_the_checkpoints_own(tmp_path: Path) -> None:
    model = random_model("llama")
    write_folder(model, tmp_path / "float")
    write_folder(model.bfloat16(), tmp_path / "half")
    assert load_model(tmp_path / "float", dtype="auto", device=CPU).dtype == torch.float32
    assert load_model(tmp_path / "half", dtype="auto", device=CPU).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="there are: auto"):
        load_model(tmp_path / "half", dtype="float8", device=CPU)


def test_end_tokens_and_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    write_folder(random_model("llama"), tmp_path)
    defaults = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    config = load_config(tmp_path)
    assert config.eos_token_ids == (5, 6, 2)
    assert (config.generation.temperature, config.generation.top_k, config.generation.top_p) == (0.6, 20, None)


def test_tokenizer_files_of_a_folder_are_taken_as_they_are(tmp_path: Path) -> None:
    write_folder(random_model("llama"), tmp_path)
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizer = Tokenizer(token_models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": {"content": "b"}, "bos_token": None, "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    first = load_tokenizer(tmp_path)
    assert (first.eos_token, first.bos_token, first.chat_template, first.eos_token_ids) == ("b", None, "old", (2,))
    (tmp_path / "chat_template.jinja").write_text("new")
    second = load_tokenizer(tmp_path)
    assert second.chat_template == "new"
    assert second.fingerprint != first.fingerprint
    assert load_tokenizer(tmp_path).fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "supported: LlamaForCausalLM"),
        ({"architectures": None}, "supported: LlamaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding-window"),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "supported: default, linear, llama3, yarn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "supported: silu"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"partial_rotary_factor": 0.5}, "partial"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    raw = json.loads(json.dumps(random_model("llama").config.to_dict())) | {"architectures": ["LlamaForCausalLM"]}
    raw.pop("rope_parameters")
    parse_config(raw, {})
    with pytest.raises(ModelError, match=message):
        parse_config(raw | settings, {})


def test_a_window_that_is_not_used_is_no_reason_to_refuse() -> None:
    raw = random_model("qwen2", use_sliding_window=False).config.to_dict()
    raw |= {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    assert parse_config(raw, {}).qkv_bias


@pytest.mark.parametrize(
    ("stated", "scaling", "max_context"),
    [
        (32_768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        (32_768, {"rope_type": "yarn", "factor": 4.0}, 131_072),
        (131_072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        (131_072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8_192}, 131_072),
        (16_384, {"rope_type": "linear", "factor": 4.0}, 16_384),
    ],
)
def test_yarn_serves_the_trained_context_times_its_factor(
    stated: int, scaling: dict[str, Any], max_context: int
) -> None:
    raw = random_model("qwen2").config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    raw |= {"max_position_embeddings": stated, "rope_parameters": scaling}
    assert parse_config(raw, {}).max_context == max_context


def test_missing_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf"):
        load_config(tmp_path / "model.bin")
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all, but long enough to be read")
    with pytest.raises(ModelError, match="no readable, whole GGUF"):
        load_config(tmp_path / "bad.gguf")


def test_a_tensor_of_another_shape_than_the_configuration_is_refused(tmp_path: Path) -> None:
    write_folder(random_model("llama"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"intermediate_size": 99}))
    with pytest.raises(ModelError, match="the configuration says"):
        runner_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 9}))
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.3"):
        runner_of(tmp_path)


def test_tensors_that_the_configuration_has_no_use_for_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(random_model("llama", attention_bias=True), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"attention_bias": False}))
    with pytest.raises(ModelError, match=r"12 tensors .* first 'model\.layers\.0\.self_attn\.k_proj\.bias'"):
        runner_of(tmp_path)


def test_what_older_checkpoints_carry_without_need_is_passed_over(tmp_path: Path) -> None:
    write_folder(random_model("llama", tie_word_embeddings=True), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, file)
    assert greedy_text(runner_of(tmp_path), PROMPT, 2)


def test_fingerprints_follow_content_and_not_place(tmp_path: Path) -> None:
    model = random_model("llama")
    first, second = write_folder(model, tmp_path / "a"), write_folder(model, tmp_path / "b")
    assert model_fingerprint(first) == model_fingerprint(second)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    third = write_folder(model, tmp_path / "c")
    assert model_fingerprint(third) != model_fingerprint(first)
    assert model_fingerprint(default_model_path()) == model_fingerprint(default_model_path())


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: the two rotary halves of a head interleaved."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, quantization: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """``model`` as a GGUF file, and the weights that a reader must find in it."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    names += [f"blk.{layer}.{part}.weight" for layer in range(config.num_hidden_layers) for part in parts]
    state, wanted = model.state_dict(), {}
    for name in names:
        weight = state[checkpoint_name(name)].numpy()
        kind = gguf.GGMLQuantizationType.F32 if "norm" in name else quantization
        stored = gguf.quants.quantize(weight, kind)
        wanted[checkpoint_name(name)] = torch.from_numpy(np.array(gguf.quants.dequantize(stored, kind)))
        part = name.split(".")[-2]
        if part in heads:
            stored = gguf.quants.quantize(permuted(weight, heads[part]), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_weights_equal_their_dequantised_values_in_checkpoint_order(kind: str, tmp_path: Path) -> None:
    model = random_model("llama", hidden_size=64, intermediate_size=96)
    wanted = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType[kind])
    loaded = load_model(tmp_path / "model.gguf", dtype="float32", device=CPU)
    assert loaded.weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(loaded.weights[name], weight), name
    model.load_state_dict(wanted)
    expected = model(torch.tensor([PROMPT])).logits[0].detach()
    torch.testing.assert_close(logits_of(runner_of(tmp_path / "model.gguf"), PROMPT), expected, atol=1e-4, rtol=0)


def half(data: bytes) -> float:
    return float(np.frombuffer(data, dtype=np.float16)[0])


def q4_k(block: bytes) -> Iterator[float]:
    """256 values in 144 bytes: scale, minimum scale, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles."""
    d, dmin, packed, nibbles = half(block[:2]), half(block[2:4]), block[4:16], block[16:]
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)
        chunk = nibbles[group // 2 * 32 : group // 2 * 32 + 32]
        yield from (d * scale * (byte >> 4 if group % 2 else byte & 15) - dmin * minimum for byte in chunk)


def q6_k(block: bytes) -> Iterator[float]:
    """256 values in 210 bytes: low nibbles, high pairs of bits, 16 signed scales, one scale of scales."""
    low, high, scales, d = block[:128], block[128:192], np.frombuffer(block[192:208], dtype=np.int8), half(block[208:])
    for index in range(256):
        part, at = divmod(index, 128)
        quarter, lane = divmod(at, 32)
        nibble = low[part * 64 + quarter % 2 * 32 + lane] >> (4 if quarter >= 2 else 0) & 15
        bits = high[part * 32 + lane] >> (2 * quarter) & 3
        yield d * int(scales[index // 16]) * ((nibble | bits << 4) - 32)


@pytest.mark.parametrize(
    ("kind", "size", "by_hand", "halves"), [("Q4_K", 144, q4_k, (0, 2)), ("Q6_K", 210, q6_k, (208,))]
)
def test_k_quants_are_read_as_their_format_says(
    kind: str, size: int, by_hand: Any, halves: tuple[int, ...], tmp_path: Path
) -> None:
    generator = np.random.default_rng(5)
    model = random_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1, vocab_size=16)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, gguf.GGMLQuantizationType.F32)
    reader = gguf.GGUFReader(path, "r+")
    blocks = generator.integers(0, 256, (256, size), dtype=np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = generator.normal(scale=0.01, size=(256, 1)).astype(np.float16).view(np.uint8)
    tensor = next(one for one in reader.tensors if one.name == "blk.0.ffn_up.weight")
    assert tensor.shape.tolist() == [256, 256]
    tensor.data.reshape(-1).view(np.uint8)[: blocks.size] = blocks.reshape(-1)
    tensor.field.parts[-2][:] = int(gguf.GGMLQuantizationType[kind])  # the type in the tensor's directory entry
    reader.data.flush()
    weight = load_model(path, dtype="float32", device=CPU).weights["model.layers.0.mlp.up_proj.weight"]
    wanted = torch.tensor([list(by_hand(block.tobytes())) for block in blocks])
    torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=1e-5)
