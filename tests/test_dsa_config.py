"""The indexer's numbers in all their spellings, and the indexers that are not ours."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import k3_config
from mlxmoe.config import DsaConfig, KimiConfig, read_config
from mlxmoe.errors import CheckpointError

FULL = [*range(4, 93, 4), 93]


def kimi(folder: Path, config: object) -> KimiConfig:
    """The config as read, which must be a Kimi."""
    (folder / "config.json").write_text(json.dumps(config))
    read = read_config(folder)
    assert isinstance(read, KimiConfig)
    return read


def refusal(folder: Path, config: object) -> str:
    """The line with which a config is refused."""
    with pytest.raises(CheckpointError) as caught:
        kimi(folder, config)
    return str(caught.value)


def k31_config(dsa: object) -> dict[str, Any]:
    """K3's config as K3.1 with this dsa_config."""
    config = k3_config()
    config |= {"architectures": ["KimiK31ForConditionalGeneration"], "model_type": "kimi_k31"}
    if dsa is not None:
        config["text_config"]["dsa_config"] = dsa
    return config


@pytest.mark.parametrize(
    ("dsa", "expected"),
    [
        ({"index_n_heads": 4, "index_head_dim": 64, "index_topk": 7}, (4, 64, 7)),
        ({"num_heads": 4, "head_dim": 64, "topk": 7}, (4, 64, 7)),
        ({"n_heads": 4, "top_k": 7}, (4, 128, 7)),
        ({"n_head": 4, "topk_tokens": 7, "layers": FULL, "rope": False}, (4, 128, 7)),
        ({"index_topk": 7, "topk": 9, "index_n_heads": None, "n_heads": 5}, (5, 128, 7)),
        ({"full_attn_layers": FULL[::-1], "indexer_types": ["full"] * 24}, (32, 128, 2048)),
        ({"share_layers": [], "use_rope": None, "k_pool": 0}, (32, 128, 2048)),
        (None, (32, 128, 2048)),
    ],
)
def test_dsa_spellings(tmp_path: Path, dsa: object, expected: tuple[int, ...]) -> None:
    """Each way to spell the indexer's numbers is read, the first of several wins."""
    read = kimi(tmp_path, k31_config(dsa)).dsa

    assert read is not None
    assert (read.n_heads, read.head_dim, read.topk) == expected
    assert read.norm_eps == 1e-5


def test_dsa_places(tmp_path: Path) -> None:
    """dsa_config before flat keys, text_config before the top level; its own eps."""
    config = k3_config()
    config |= {"dsa_config": {"n_heads": 8, "eps": 1e-6}, "index_topk": 100}
    config["text_config"] |= {"index_topk": 50, "index_n_heads": 16}
    read = kimi(tmp_path, config).dsa

    assert read == DsaConfig(8, 128, 50, 1e-6, frozenset({"n_heads", "topk", "norm_eps"}))


@pytest.mark.parametrize(
    ("dsa", "word"),
    [
        ({"layers": [4, 8]}, "dsa_config.layers is a list of 2, expected exactly the full"),
        ({"dsa_layers": [i - 1 for i in FULL]}, "dsa_layers"),
        ({"use_rope": True}, "use_rope is True"),
        ({"rope_dim": 64}, "rope_dim"),
        ({"index_share_freq": 2}, "index_share_freq"),
        ({"KPool": 4}, "KPool"),
        ({"learnable_sink": "yes"}, "learnable_sink"),
        ({"indexer_types": ["full", "shared"]}, "an indexer of kind 'shared' is not supported"),
        ({"indexer_types": 3}, "indexer_types"),
        ({"topk": 0}, "topk is 0"),
        ({"topk": "many"}, "topk is 'many'"),
        ({"eps": -1.0}, "eps is -1.0"),
        ([], "dsa_config is a list of 0, expected an object"),
    ],
)
def test_unsupported_indexers_are_refused(tmp_path: Path, dsa: object, word: str) -> None:
    """An indexer that this program would compute wrongly is named, not run."""
    assert word in refusal(tmp_path, k31_config(dsa))


def test_flat_index_sharing_is_refused(tmp_path: Path) -> None:
    """GLM's flat keys for shared indices are refused; a frequency of 1 shares nothing."""
    config = k31_config(None)
    config["text_config"]["index_topk_freq"] = 1
    assert kimi(tmp_path, config).dsa is not None
    config["text_config"]["index_topk_freq"] = 4
    assert "index_topk_freq is 4" in refusal(tmp_path, config)
