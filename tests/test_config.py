"""config.json of Kimi models and others: what is read, and what is refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import k3_config
from mlxmoe.config import DsaConfig, ForeignConfig, KdaConfig, KimiConfig, read_config
from mlxmoe.errors import CheckpointError

GOLDENS = Path(__file__).parent / "goldens"
FULL = [*range(4, 93, 4), 93]
Change = Callable[[dict[str, Any]], object]


def folder_of(tmp_path: Path, config: object, generation: object = None) -> Path:
    """A folder with just the config files."""
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (tmp_path / "config.json").write_bytes(text)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def kimi(tmp_path: Path, config: object, generation: object = None) -> KimiConfig:
    """The config as read, which must be a Kimi."""
    read = read_config(folder_of(tmp_path, config, generation))
    assert isinstance(read, KimiConfig)
    return read


def refusal(folder: Path) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        read_config(folder)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_k3_is_read_in_full(tmp_path: Path) -> None:
    """Every number of the published K3 arrives, layers counted from 0."""
    config = kimi(tmp_path, k3_config())

    assert config.model_type == "kimi_k3"
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (7168, 163840, 93)
    assert config.full_attention_layers == (*range(3, 92, 4), 92)
    assert len(config.kda_layers) == 69
    assert config.kda == KdaConfig(96, 128, 4, -5.0)
    assert (config.num_experts, config.top_k, config.routed_expert_hidden_size) == (896, 16, 3584)
    assert config.moe_layers == tuple(range(1, 93))
    assert (config.context_length, config.rms_norm_eps) == (1048576, 1e-5)
    assert (config.mla_norm_eps, config.l2norm_eps) == (1e-6, 1e-6)
    assert config.quantization is not None
    assert (config.quantization.mode, config.quantization.group_size) == ("mxfp4", 32)
    assert config.dsa is None
    assert config.eos_token_ids == (163586,)
    assert [config.is_kda(i) for i in (0, 3, 91, 92)] == [True, False, False, False]
    assert [config.is_moe(i) for i in (0, 1, 92)] == [False, True, True]


def test_goldens_are_read() -> None:
    """The two tiny checkpoints are read, the second with its indexer's numbers."""
    k3, k31 = (read_config(GOLDENS / name) for name in ("tiny-k3", "tiny-k31"))

    assert isinstance(k3, KimiConfig)
    assert isinstance(k31, KimiConfig)
    assert k3.full_attention_layers == (3, 6, 7)
    assert k3.dsa is None
    stated = frozenset({"n_heads", "head_dim", "topk"})
    assert k31.dsa == DsaConfig(4, 32, 24, 1e-5, stated)


def test_a_flat_text_model_is_read(tmp_path: Path) -> None:
    """K3's text model alone: its keys at the top, model_type kimi_linear."""
    flat = k3_config()["text_config"] | {"eos_token_id": 7}

    assert kimi(tmp_path, flat).model_type == "kimi_k3"
    assert kimi(tmp_path, flat).eos_token_ids == (7,)
    flat["dsa_config"] = {"topk": 5}
    assert kimi(tmp_path, flat).model_type == "kimi_k31"


def test_other_models_are_foreign(tmp_path: Path) -> None:
    """Whatever is no K3 is left to mlx-lm, Kimi-Linear-48B too, with the numbers it states."""
    linear = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    nested = {
        "model_type": "qwen3_5_moe",
        "eos_token_id": [3, 1],
        "num_hidden_layers": 99,
        "text_config": {"num_hidden_layers": 4, "num_experts_per_tok": 8, "head_dim": True},
    }

    assert read_config(folder_of(tmp_path, linear)) == ForeignConfig("kimi_linear", linear)
    read = read_config(folder_of(tmp_path, nested))
    assert isinstance(read, ForeignConfig)
    assert (read.num_hidden_layers, read.top_k, read.context_length) == (4, 8, None)
    assert (read.eos_token_ids, read.number("head_dim")) == ((1, 3), None)


def test_generation_config_names_the_end(tmp_path: Path) -> None:
    """eos_token_id of generation_config.json goes before config.json's."""
    assert kimi(tmp_path, k3_config(), {"eos_token_id": [9, 8]}).eos_token_ids == (8, 9)
    assert kimi(tmp_path, k3_config(), {"max_length": 1}).eos_token_ids == (163586,)


TEXT_KEYS = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "kv_lora_rank"),
    *("max_position_embeddings", "rms_norm_eps", "num_attention_heads", "attn_res_block_size"),
    *("activation_situ_beta", "activation_situ_linear_beta", "q_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "first_k_dense_replace", "num_experts"),
    *("num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "hidden_act"),
    *("routed_expert_hidden_size", "moe_renormalize", "routed_scaling_factor", "mla_use_nope"),
    *("mla_use_output_gate", "latent_moe_use_norm", "moe_router_activation_func"),
]
LINEAR_KEYS = ["full_attn_layers", "kda_layers", "num_heads", "head_dim"]
LINEAR_KEYS += ["short_conv_kernel_size", "gate_lower_bound", "use_full_rank_gate"]
WRONG = [-1, "x", [], {}, True, 10**30, 1e300, None]


@pytest.mark.parametrize("key", TEXT_KEYS)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_each_key_refuses_nonsense(tmp_path: Path, key: str, value: object) -> None:
    """No key the model needs takes a wrong type, an absurd size, or to be missing."""
    config = k3_config()
    if value is True and isinstance(config["text_config"][key], bool):
        value = False if key != "moe_renormalize" else "False"
    config["text_config"][key] = value

    assert f"config.json: text_config.{key} is " in refusal(folder_of(tmp_path, config))


@pytest.mark.parametrize("key", LINEAR_KEYS)
@pytest.mark.parametrize("value", [-1000, "x", [3], {}, False, 10**30, 0, None], ids=repr)
def test_each_kda_key_refuses_nonsense(tmp_path: Path, key: str, value: object) -> None:
    """The same for linear_attn_config, whose layer lists must part the layers exactly."""
    config = k3_config()
    config["text_config"]["linear_attn_config"][key] = value

    message = refusal(folder_of(tmp_path, config))
    assert "text_config.linear_attn_config." in message
    assert key in message


def text_set(key: str, value: object) -> Change:
    """A change of one key of text_config."""
    return lambda config: config["text_config"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (text_set("num_expert_group", 2), "num_expert_group is 2, expected 1"),
        (text_set("topk_group", 2), "topk_group"),
        (text_set("topk_method", "greedy"), "topk_method"),
        (text_set("hidden_act", "silu"), "hidden_act is 'silu', expected \"situ\""),
        (text_set("num_experts_per_token", 897), "num_experts_per_token is 897"),
        (text_set("moe_intermediate_size", 3056), "a multiple of 32"),
        (text_set("routed_expert_hidden_size", 3600 - 8), "a multiple of 32"),
        (text_set("num_key_value_heads", 8), "num_key_value_heads is 8, expected 96"),
        (text_set("tie_word_embeddings", True), "tie_word_embeddings"),
        (lambda c: c.update(eos_token_id=163840), "eos_token_id is 163840"),
        (text_set("moe_layer_freq", 0), "moe_layer_freq"),
        (text_set("quantization_config", {"quant_method": "awq"}), "quant_method is 'awq'"),
        (text_set("quantization_config", 4), "quantization_config is 4, expected an object"),
        (lambda c: c.pop("model_type"), "model_type is missing"),
        (lambda c: c.update(model_type=["kimi_k3"]), "model_type is a list of 1"),
        (lambda c: c.update(model_type="a\nb"), "model_type is 'a\\nb'"),
        (lambda c: c.update(text_config=[]), "text_config is a list of 0"),
        (lambda c: c.update(text_config=None), "vocab_size is missing"),
        (lambda c: c.update(eos_token_id=None), "eos_token_id is missing"),
        (lambda c: c.update(bos_token_id=-1), "bos_token_id is -1"),
    ],
)
def test_what_the_model_cannot_do_is_refused(tmp_path: Path, change: Change, word: str) -> None:
    """Settings of other models are refused by name with the supported value."""
    config = k3_config()
    change(config)

    assert word in refusal(folder_of(tmp_path, config))


@pytest.mark.parametrize("bound", [0, 0.0, 5.0, -10.5, float("-1e300")])
def test_gate_bound_stays_in_range(tmp_path: Path, bound: float) -> None:
    """The decay's lower bound is in [-10, 0), where half a half-chunk stays finite in float32."""
    config = k3_config()
    config["text_config"]["linear_attn_config"]["gate_lower_bound"] = bound
    assert "gate_lower_bound" in refusal(folder_of(tmp_path, config))


@pytest.mark.parametrize(
    ("kda", "full", "word"),
    [
        ([1, 2], FULL, "3 is in neither list"),
        (list(range(1, 94)), FULL, "4 is in both lists"),
        ([i for i in range(93) if i not in FULL], FULL, "kda_layers is a list of 70"),
    ],
)
def test_layers_are_parted_exactly(
    tmp_path: Path, kda: list[int], full: list[int], word: str
) -> None:
    """Each layer is KDA or full attention; the odd one is named, counted from 1 as in the file."""
    config = k3_config()
    config["text_config"]["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    assert word in refusal(folder_of(tmp_path, config))


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "not JSON"),
        (b"[1]", "holds a list of 1, expected a JSON object"),
        (b'{"model_type": "x", "model_type": "y"}', "key 'model_type' is given twice"),
        (b'{"model_type": "x", "a": {"b": NaN}}', "NaN is not a JSON number"),
        (b'{"model_type": "x", "a": -Infinity}', "-Infinity"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"model_type": "\xff"}', "not UTF-8 at byte 16"),
        ('{"model_type": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'\xef\xbb\xbf{"model_type": "x"}', "not JSON"),
        (b'{"model_type": "kimi_k3", "a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"model_type": "\\ud800"}', "model_type"),
        (b'{"model_type": "x"} {}', "not JSON"),
        (b'{"model_type": "x",\x00}', "not JSON"),
    ],
)
def test_damaged_json_is_one_line(tmp_path: Path, data: bytes, word: str) -> None:
    """Whatever the bytes are, one printable line says what is wrong with them."""
    message = refusal(folder_of(tmp_path, data))

    assert word in message
    assert str(tmp_path / "config.json") in message


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    """A config of 1 GB is refused by its size."""
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10**9)
    assert "1,000,000,000 bytes, expected at most 4,194,304" in refusal(tmp_path)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    """No folder, an empty one, a folder or a pipe for a file: named, and never waited for."""
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "is not a file" in refusal(tmp_path)
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")
    assert "is not a file" in refusal(tmp_path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_nextn_predict_layers"])
def test_absurd_layer_counts_of_other_models_are_refused(tmp_path: Path, key: str) -> None:
    """Another model's config may not make mlx-lm build a trillion layers."""
    config = {"model_type": "qwen3_moe", key: 1 << 40}
    assert "at most 10000" in refusal(folder_of(tmp_path, config))
