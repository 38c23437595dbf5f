"""The numbers of a K3.1 indexer, out of the several ways a config may spell them.

`dsa_config` (in text_config, else at the top level) is asked first, then the flat
keys of text_config, then those of the top level; the first hit wins. Where the file
is silent the numbers announced for K3.1 stand, until the tensors' shapes settle them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mlxmoe.untrusted import Fields, show

N_HEADS = ("index_n_heads", "num_heads", "n_heads", "n_head")
HEAD_DIM = ("index_head_dim", "head_dim")
TOPK = ("index_topk", "topk", "top_k", "topk_tokens")
LAYERS = ("dsa_layers", "layers", "full_attn_layers")
NORM_EPS = ("norm_eps", "layernorm_eps", "eps")
FLAT = ("index_n_heads", "index_head_dim", "index_topk")
# Selection that is rotated, shared between layers, pooled or has sinks is another model.
OTHER_MODELS = ("rope", "share", "pool", "sink", "_freq", "_pattern", "_skip")


@dataclass(frozen=True, slots=True)
class DsaConfig:
    """The lightning indexer of a gated DSA layer.

    `n_heads` query heads of `head_dim`, the `topk` best keys are kept, `norm_eps` is
    the key LayerNorm's. `stated` names the fields the config gave.
    """

    n_heads: int
    head_dim: int
    topk: int
    norm_eps: float
    stated: frozenset[str] = frozenset()


def read_dsa(
    top: Fields, text: Fields, full_layers: tuple[int, ...], rms_norm_eps: float, wanted: bool
) -> DsaConfig | None:
    """The indexer's numbers, or None when the config has no word of one and none is `wanted`.

    `full_layers`: the full-attention layers, 1-indexed as in the file.
    """
    own = text.find("dsa_config") or top.find("dsa_config")
    flat = [fields for fields in (text, top) if any(fields.has(key) for key in FLAT)]
    if own is None and not flat and not wanted:
        return None
    _refuse_other_models(own, text, top)
    if own is not None:
        _check_layers(own, full_layers)
    places = [(own, True)] if own else []
    places += [(fields, False) for fields in flat]
    stated: set[str] = set()

    def number(name: str, keys: tuple[str, ...], default: int) -> int:
        for fields, is_own in places:
            for key in keys if is_own else keys[:1]:
                if fields.has(key):
                    stated.add(name)
                    return fields.whole(key, 1, 1 << 20)
        return default

    eps_key = next((key for key in NORM_EPS if own and own.has(key)), None)
    if own and eps_key:
        stated.add("norm_eps")
        rms_norm_eps = own.real(eps_key, 0.0, 0.1)
    return DsaConfig(
        n_heads=number("n_heads", N_HEADS, 32),
        head_dim=number("head_dim", HEAD_DIM, 128),
        topk=number("topk", TOPK, 2048),
        norm_eps=rms_norm_eps,
        stated=frozenset(stated),
    )


def _check_layers(own: Fields, full_layers: tuple[int, ...]) -> None:
    key = next((key for key in LAYERS if own.has(key)), None)
    if key and own.wholes(key, 1, 1 << 20) != full_layers:
        raise own.error(key, f"exactly the full-attention layers {list(full_layers)} (1-indexed)")


def _refuse_other_models(own: Fields | None, text: Fields, top: Fields) -> None:
    """Raises when the config asks for a selection this program does not compute."""
    for fields, key in _index_keys(own, text, top):
        value = fields.data[key]
        if not value or (value == 1 and key == "index_topk_freq"):
            continue
        if key == "indexer_types":
            kinds = value if isinstance(value, list) else [value]
            odd = next((kind for kind in kinds if kind != "full"), "full")
            if odd != "full":
                raise fields.error(
                    key, f'"full" throughout: an indexer of kind {show(odd)} is not supported'
                )
        elif any(word in key.lower() for word in OTHER_MODELS):
            raise fields.error(key, "nothing: an indexer with it is not supported")


def _index_keys(own: Fields | None, text: Fields, top: Fields) -> Iterator[tuple[Fields, str]]:
    if own:
        yield from ((own, key) for key in own.data)
    for fields in (text, top):
        yield from ((fields, key) for key in fields.data if key.startswith("index"))
