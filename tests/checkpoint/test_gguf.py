"""GGUF files against the folders that they were made from and against what transformers reads of them; and every way in which one is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pentamesh.checkpoint.gguf import write_dequantised
from pentamesh.checkpoint.weights import Weights
from pentamesh.errors import InputError
from pentamesh.model import gguf as module
from pentamesh.model.families import describe
from pentamesh.model.gguf import gguf_config, gguf_name, read_gguf
from pentamesh.model.read import read_model
from pentamesh.run.unpack import gguf_tokenizer, unpacked
from tests.ggufs import write_gguf
from tests.run import toy

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "llama-untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with sizes that blocks of 32 divide, and norms and biases that are not those of an initial model."""
    path = toy.model_folder(tmp_path_factory.mktemp(request.param) / "hf", intermediate_size=64, rms_norm_eps=1e-5)
    sizes = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": "untied" not in request.param}
    sizes = {key: value for key, value in sizes.items() if key not in ("architectures", "model_type", "dtype", "transformers_version")}
    if request.param == "qwen3":
        sizes["head_dim"] = 128  # transformers takes no other from a file
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[request.param.partition("-")[0]](**sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def dequantised(path: Path, target: Path) -> dict[str, torch.Tensor]:
    target.mkdir()
    write_dequantised(read_gguf(path), target)
    return load_file(target / "model.safetensors")


def test_what_was_not_quantised_comes_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "toy.gguf")
    found, original = dequantised(path, tmp_path / "out"), load_file(folder / "model.safetensors")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], original[name]) for name in original)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"


def test_a_file_means_the_model_of_its_folder(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "toy.gguf")
    ours, theirs = read_model(str(path)), read_model(str(folder))
    assert ours.tensors == theirs.tensors
    for key in ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act", "tie_word_embeddings"):
        assert ours.config[key] == theirs.config[key], key


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_transformers_reads_the_same_weights(folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pentamesh.checkpoint.gguf.CHUNK_ELEMENTS", 1000)  # several chunks a tensor
    path = write_gguf(folder, tmp_path / "toy.gguf", kind)
    dtype = {"F16": torch.float16}.get(kind, torch.bfloat16)
    found = dequantised(path, tmp_path / "out")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="toy.gguf", dtype=torch.float32)
    expected = {name: tensor.to(dtype) for name, tensor in theirs.named_parameters()}
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    weights = Weights.open(tmp_path / "out")
    weights.check(read_model(str(tmp_path / "out")))


def test_names_are_those_of_the_package() -> None:
    for architecture in module.ARCHITECTURES:
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = sizes | {"model_type": architecture, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}
        names = gguf.get_tensor_name_map({name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], 2)
        model = describe(config, "toy")
        assert model is not None
        for tensor in model.tensors:
            path, _, kind = tensor.name.rpartition(".")
            assert gguf_name(tensor.name) == f"{names.get_name(path)}.{kind}"


def test_an_unpacked_folder_is_a_hugging_face_folder(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "toy.gguf", "Q8_0")
    target = unpacked(path, tmp_path / "run/base")
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert not loaded[1]["unexpected_keys"]
    ours, original = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(folder)
    for text in ("the cat sees 123 houses", "<|im_start|>user\n", " café ☕\n\n  x"):
        assert ours(text)["input_ids"] == original(text)["input_ids"]
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "runs"}]
    assert ours.apply_chat_template(talk, tokenize=False) == original.apply_chat_template(talk, tokenize=False)
    assert (ours.eos_token, ours.pad_token, ours.bos_token) == ("<|im_end|>", "<|im_end|>", "<|im_start|>")
    assert ours.model_max_length == 256
    made = (target / "model.safetensors").stat().st_mtime_ns
    assert unpacked(path, target) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == made
    write_gguf(folder, path, "Q4_0")
    unpacked(path, target)
    assert (target / "model.safetensors").stat().st_mtime_ns != made
    assert sorted(p.name for p in target.parent.iterdir()) == ["base"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.model_folder(tmp_path_factory.mktemp("llama") / "hf", intermediate_size=64)


def test_smollm_splits_digits(llama: Path, tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(write_gguf(llama, tmp_path / "toy.gguf", tokenizer__ggml__pre="smollm"))
    split: Any = tokenizer.backend_tokenizer.pre_tokenizer  # type: ignore[attr-defined]
    assert [piece for piece, _ in split.pre_tokenize_str("in 1998")] == ["in", "Ġ", "1", "9", "9", "8"]


def test_splits_of_which_transformers_knows_nothing_are_refused(llama: Path, tmp_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    from pentamesh.run.unpack import KNOWN_SPLITS

    assert set(KNOWN_SPLITS) - set(GGUF_PRE_TOKENIZER_SPLITS) == {"gpt-2", "smollm"}
    with pytest.raises(InputError, match="how the tokenizer 'bloom' splits text is not known"):
        gguf_tokenizer(write_gguf(llama, tmp_path / "toy.gguf", tokenizer__ggml__pre="bloom"))


def with_factors(path: Path, folder: Path, factors: list[float]) -> Path:
    """The file with `rope_freqs.weight` beside its tensors."""
    import numpy as np

    add = gguf.GGUFWriter.write_header_to_file

    def write(self: Any, *args: Any) -> None:
        self.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
        add(self, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gguf.GGUFWriter, "write_header_to_file", write)
        return write_gguf(folder, path, ARCH__rope__freq_base=500_000.0)


def test_llama3_scaling_is_found_in_its_factors_and_nothing_else_is_believed(llama: Path, tmp_path: Path) -> None:
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 131_072}
    config = LlamaConfig(**sizes, rope_parameters=scaling | {"rope_theta": 500_000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    factors = (plain / scaled).tolist()
    assert max(factors) == pytest.approx(8.0)
    found = gguf_config(read_gguf(with_factors(tmp_path / "a.gguf", llama, factors)))
    assert found["rope_scaling"] == pytest.approx(scaling)
    with pytest.raises(InputError, match="is not Llama 3's scaling"):
        gguf_config(read_gguf(with_factors(tmp_path / "b.gguf", llama, [1.0, 1.5, 2.0, 8.0])))


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"ARCH__rope__scaling__type": "none"}, None),
        ({"ARCH__rope__scaling__type": "linear", "ARCH__rope__scaling__factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"ARCH__rope__scaling__type": "yarn", "ARCH__rope__scaling__factor": 4.0, "ARCH__rope__scaling__original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_other_scalings(llama: Path, tmp_path: Path, metadata: dict[str, Any], scaling: Any) -> None:
    assert gguf_config(read_gguf(write_gguf(llama, tmp_path / "a.gguf", **metadata))).get("rope_scaling") == scaling


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ARCH__block_count": None}, "block_count is not given"),
    ({"ARCH__block_count": 3}, r"blk\.2\.attn_norm\.weight is missing"),
    ({"ARCH__block_count": 1}, r"blk\.1\.attn_k\.weight is not part of llama"),
    ({"ARCH__embedding_length": 64}, r"token_embd\.weight should be \[300, 64\] and is \[300, 32\]"),
    ({"ARCH__attention__head_count": [4, 4]}, r"attention\.head_count is \[4, 4\]"),
    ({"ARCH__rope__freq_base": "x"}, "rope.freq_base is x"),
    ({"ARCH__expert_count": 8}, "it has 8 experts a layer"),
    ({"ARCH__attention__sliding_window": 4096}, "its attention sees 4096 tokens"),
    ({"ARCH__rope__scaling__type": "longrope"}, "scaled by longrope"),
    ({"split__count": 3}, "it is one of 3 parts\n.*\nhint: merge them"),
]


@pytest.mark.parametrize(("metadata", "expected"), REFUSED)
def test_what_is_not_what_it_says(llama: Path, tmp_path: Path, metadata: dict[str, Any], expected: str) -> None:
    path = write_gguf(llama, tmp_path / "toy.gguf", **metadata)
    with pytest.raises(InputError, match=expected) as error:
        dequantised(path, tmp_path / "out")
    assert str(path) in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_another_architecture_says_which_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "bloom")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(InputError, match=r"of the architecture bloom is not read\n.*\nhint: read are llama, qwen2, qwen3"):
        read_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("at", [0, 3, 4, 8, 20, 100, 5_000, -1])
def test_a_file_that_is_cut_short(llama: Path, tmp_path: Path, at: int) -> None:
    path = write_gguf(llama, tmp_path / "toy.gguf")
    path.write_bytes(path.read_bytes()[:at])
    with pytest.raises(InputError, match=r"is no whole GGUF file|ends at byte [\d,]+, and the file has") as error:
        dequantised(path, tmp_path / "out")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, known are 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "no whole GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "no whole GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 5000, "no whole GGUF file"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=expected):
        read_model(str(path))


def test_several_files_in_a_folder(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "a.gguf")
    assert read_model(str(tmp_path)).num_layers == 2
    write_gguf(llama, tmp_path / "b.gguf")
    with pytest.raises(InputError, match=r"holds 2 GGUF files\n.*\nhint: name one of them, like .*a\.gguf"):
        read_model(str(tmp_path))


def test_a_folder_of_someone_else_is_not_replaced(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not ours to replace"):
        unpacked(write_gguf(llama, tmp_path / "a.gguf"), tmp_path / "base")
    assert (tmp_path / "base/mine.txt").read_text() == "mine"
