"""The checksum of weights: blind to names, order, fusion and padding; not to values."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.errors import CheckpointError
from spangrad.weights.adapters import adapter_facts
from spangrad.weights.checksums import checksum_directory, sums_of_directory, tokenizer_hash
from spangrad.weights.safetensors_header import INDEX
from spangrad.weights.shards import MASK, MIX_A, MIX_B
from spangrad.weights.sums import tensor_sums

KINDS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
"""Integers of the size of a word."""


def write(directory: Path, name: str, dtype: str, arrays: dict[str, np.ndarray]) -> Path:
    """A safetensors file by the format's own description."""
    header, body = {}, b""
    for key, array in arrays.items():
        header[key] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + array.nbytes]}
        body += array.tobytes()
    text = json.dumps(header).encode()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(struct.pack("<Q", len(text)) + text + body)
    return directory


def reference(words: list[int]) -> int:
    """The formula of the module's docstring, one word at a time."""
    total = 0
    for word in words:
        mixed = word * MIX_A & MASK
        mixed ^= mixed >> 32
        mixed = mixed * MIX_B & MASK
        mixed ^= mixed >> 29
        total = (total + mixed) & MASK
    return total


def plain(words: list[int], dtype: str) -> int:
    return tensor_sums(np.array(words, KINDS[dtype]), dtype, dtype).plain


@pytest.mark.parametrize("dtype", KINDS)
@given(data=st.data())
def test_plain_sum_matches_formula_of_docstring(dtype: str, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.integers(0, np.iinfo(KINDS[dtype]).max)))
    assert plain(words, dtype) == reference(words)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), st.integers(0, 3), st.randoms())
def test_plain_sum_ignores_order_and_zero_padding(words: list[int], padding: int, shuffler: object) -> None:
    shuffled = [*words, *[0] * padding]
    shuffler.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plain(shuffled, "float32") == plain(words, "float32")


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
@given(data=st.data())
def test_mixed_words_of_torch_equal_those_of_numpy(kind: type[np.unsignedinteger], data: st.DataObject) -> None:
    """A GPU mixes by PyTorch, a CPU by NumPy, also words that lie apart in memory."""
    torch, module = pytest.importorskip("torch"), pytest.importorskip("gateway.vllm_plugin.mixing")
    bits = 8 * np.dtype(kind).itemsize
    words = np.array(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=12, max_size=12)), kind).reshape(3, 4)
    tensor = torch.from_numpy(words.view(f"i{bits // 8}"))[:, ::2]
    mixed = module.mixed(tensor)
    assert mixed.tolist() == module.mixed_by_torch(tensor).tolist()
    assert int(mixed.sum()) & MASK == reference(words[:, ::2].reshape(-1).tolist())


def test_checksum_directory_of_fused_and_split_files_agrees_unlike_changed_bit(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    split = write(tmp_path / "split", "model.safetensors", "F32", {"q": values[:2], "k": values[2:4], "v": values[4:]})
    fused = write(tmp_path / "fused", "a.safetensors", "F32", {"qkv": values[:4]})
    write(fused, "b.safetensors", "F32", {"rest": values[4:]})
    assert checksum_directory(split) == checksum_directory(fused)
    values[3, 1] = np.nextafter(values[3, 1], np.float32(9))
    other = write(tmp_path / "other", "model.safetensors", "F32", {"all": values})
    assert checksum_directory(other) != checksum_directory(split)


@pytest.mark.parametrize("own", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_of_directory_cast_to_another_dtype_match_torch(tmp_path: Path, own: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    letters = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    values = torch.cat([torch.randn(300_000, generator=torch.Generator().manual_seed(0)), torch.tensor([1e9, -1e-9, 0.0, -0.0, 65519.0])])
    held = values.to(getattr(torch, own))
    directories = [
        write(tmp_path / name, "m.safetensors", letters[name], {"w": each.contiguous().view(torch.uint8).numpy()})
        for name, each in ((f"{own}", held), (f"{dtype}", held.to(getattr(torch, dtype))))
    ]
    assert sums_of_directory(directories[0], dtype) == sums_of_directory(directories[-1])


def test_checksum_directory_of_invalid_files_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        checksum_directory(tmp_path)
    whole = write(tmp_path / "cut", "m.safetensors", "F32", {"w": np.ones(8, dtype=np.float32)}) / "m.safetensors"
    whole.write_bytes(whole.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="is truncated: tensor w"):
        checksum_directory(tmp_path / "cut")
    mixed = write(tmp_path / "f", "m.safetensors", "F32", {"w": np.ones(1, dtype=np.float32)})
    with pytest.raises(CheckpointError, match="weights of dtype float64 cannot be compared"):
        checksum_directory(mixed, "float64")
    write(mixed, "n.safetensors", "F16", {"v": np.ones(1, dtype=np.float16)})
    with pytest.raises(CheckpointError, match="holds float16 weights beside float32"):
        checksum_directory(mixed)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"w": 3}',
        '{"w": {"dtype": "F32"}}',
        '{"w": {"dtype": "F32", "data_offsets": 4}}',
        '{"w": {"dtype": "F32", "data_offsets": [0, "x"]}}',
        "[" * 100_000,
        "{",
    ],
)
def test_checksum_directory_of_invalid_header_raises(tmp_path: Path, header: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"m\.safetensors is not a safetensors file: its header cannot be read"):
        checksum_directory(tmp_path)


def test_checksum_directory_with_index_reads_only_its_files(tmp_path: Path) -> None:
    """Mistral's repositories hold the same weights once more, under other names, in consolidated.safetensors."""
    words = np.array([1, 2, 3], np.uint32)
    directory = write(tmp_path, "model-00001-of-00001.safetensors", "F32", {"model.norm.weight": words})
    alone = checksum_directory(directory)
    write(directory, "consolidated.safetensors", "F32", {"norm.weight": words})
    index = directory / INDEX
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    assert checksum_directory(directory) == alone
    assert set(sums_of_directory(directory)) == {"model.norm.weight"}
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002\.safetensors, which is missing"):
        checksum_directory(directory)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        checksum_directory(directory)


def test_checksum_directory_of_partial_value_raises(tmp_path: Path) -> None:
    header = b'{"w": {"dtype": "F32", "data_offsets": [0, 6]}}'
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 6)
    with pytest.raises(CheckpointError, match="tensor w has 6 bytes, which are no float32 values"):
        checksum_directory(tmp_path)


def test_checksum_directory_of_unreadable_files_raises(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"cannot be read: .*No such file or directory: .*m\.safetensors"):
        checksum_directory(tmp_path)
    write(tmp_path / "base", "model.safetensors", "F32", {"w": np.ones(2, dtype=np.float32)})
    facts = {"base_model_name_or_path": str(tmp_path / "base"), "r": 1, "lora_alpha": 1}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(facts))
    (tmp_path / "adapter" / "adapter_model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Is a directory"):
        checksum_directory(tmp_path / "adapter")


@pytest.mark.parametrize(
    "config",
    [
        *("[]", "{", '{"r": 1}'),
        pytest.param("[" * 100_000, id="deep"),
        *(f'{{"base_model_name_or_path": "m", "r": {rank}, "lora_alpha": 1}}' for rank in ('"x"', "0", "1e999")),
    ],
)
def test_adapter_facts_of_invalid_configuration_raises(tmp_path: Path, config: str) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is no configuration of a LoRA adapter"):
        adapter_facts(tmp_path)


def test_tokenizer_hash_follows_vocabulary_and_template_not_spacing(tmp_path: Path) -> None:
    def tokenizer(name: str, vocabulary: str, template: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(vocabulary)
        (tmp_path / name / "chat_template.jinja").write_text(template)
        return tokenizer_hash(tmp_path / name)

    base = tokenizer("a", '{"v": 1, "w": 2}', "t")
    assert base == tokenizer("b", '{"w":2,"v":1}', "t")
    with pytest.raises(CheckpointError, match=r"e/tokenizer\.json cannot be read .*Restore it from a copy"):
        tokenizer("e", '{"v": ', "t")
    (tmp_path / "e" / "tokenizer.json").write_text("{}")
    (tmp_path / "e" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"e/chat_template\.jinja cannot be read .*Restore it from a copy"):
        tokenizer_hash(tmp_path / "e")
    (tmp_path / "e" / "chat_template.jinja").unlink()
    (tmp_path / "e" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"e/tokenizer_config\.json cannot be read .*Restore it from a copy"):
        tokenizer_hash(tmp_path / "e")
    assert len({base, tokenizer("c", '{"v": 2}', "t"), tokenizer("d", '{"v": 1, "w": 2}', "u")}) == 3
