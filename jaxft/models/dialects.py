"""Fields of config.json that need more than another name, by `model_type`; and which values are refused."""

from collections.abc import Mapping
from typing import Any

# Names of model types -> `BertConfig.model_type`.
_ALIASES = {"new": "gte"}

# Encoders that are near to a supported type -> why they are not supported.
REASONS = {
    "dpr": "its checkpoints have a question, a context or a reader model, each with other names and no head",
    "mobilebert": "its layers have bottlenecks, several feed-forward networks and no LayerNorm",
    "roformer": "its rotary positions rotate neighbouring elements",
    "xlm-roberta-xl": "its layers norm first, and its embeddings have no norm",
}

# Fields of which one value alone is supported, besides an absent or null field: the fields of NomicBERT, GTE and Jina
# come from their first implementations, whose code is not part of transformers.
_ONLY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "nomic_bert": {
        "prenorm": (False,), "use_rms_norm": (False,), "rotary_emb_fraction": (1,), "rotary_emb_interleaved": (False,),
        "rotary_emb_scale_base": (), "rotary_scaling_factor": (), "causal": (False,), "parallel_block": (False,),
        "qkv_proj_bias": (False,), "mlp_fc1_bias": (False,), "mlp_fc2_bias": (False,), "num_experts": (0,),
        "moe_every_n_layers": (0, -1), "activation_function": ("swiglu",),
    },
    "gte": {
        "logn_attention_scale": (False,), "layer_norm_type": ("layer_norm",), "position_embedding_type": ("rope",),
    },
    "modernbert": {"embedding_dropout": (0,), "mlp_dropout": (0,), "decoder_bias": (True,)},
    "albert": {"num_hidden_groups": (1,), "inner_group_num": (1,), "position_embedding_type": ("absolute",)},
    "ernie": {"use_task_id": (False,), "position_embedding_type": ("absolute",)},
    "jina_bert": {"position_embedding_type": ("alibi",)},
    "jina_embeddings_v3": {},  # transformers does not read position_embedding_type for these two
    "mpnet": {},
    "deberta-v2": {
        "relative_attention": (True,), "share_att_key": (True,), "position_biased_input": (False,),
        "norm_rel_ebd": ("layer_norm",), "conv_kernel_size": (0,), "attention_head_size": (),
        "pooler_dropout": (0,), "type_vocab_size": (0,), "legacy": (True,),
    },
}  # fmt: skip
_ABSOLUTE = {"position_embedding_type": ("absolute",)}
# Fields without which transformers' default applies, which is not supported.
_NEEDED = {"deberta-v2": ("relative_attention", "share_att_key", "position_biased_input", "norm_rel_ebd")}

# BertConfig's names -> names of NomicBERT's first implementation.
_NOMIC_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon",
                "max_position_embeddings": "n_positions", "hidden_dropout_prob": "resid_pdrop",
                "attention_probs_dropout_prob": "attn_pdrop", "rope_theta": "rotary_emb_base"}  # fmt: skip
_MODERNBERT_ROPES = {"full_attention": "rope_theta", "sliding_attention": "local_rope_theta"}
_JINA_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}


def model_type(config: Mapping[str, Any]) -> Any:
    """Returns `BertConfig.model_type` for a config.json."""
    found = config.get("model_type")
    if found == "bert" and config.get("position_embedding_type") == "alibi":
        return "jina_bert"
    return _ALIASES.get(found, found) if isinstance(found, str) else found


def read(kind: str, config: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns fields of BertConfig that override `values`, and a description of each problem with config.json."""
    own: dict[str, Any] = {}
    problems = []
    for name, allowed in _ONLY.get(kind, _ABSOLUTE).items():
        found = config.get(name)
        if found is None and name in _NEEDED.get(kind, ()):
            problems.append(f"{name} must be {allowed[0]!r}, it is missing")
        elif found is not None and found not in allowed:
            wanted = " or ".join(map(repr, allowed)) or "absent"
            problems.append(f"{name} must be {wanted}, got {found!r:.100}; another value is not supported")
    if config.get("lora_adaptations"):
        problems.append(
            "lora_adaptations: task adapters are not supported; use a checkpoint of the encoder alone, in the format "
            "of transformers (model_type jina_embeddings_v3)"
        )
    if kind == "nomic_bert":  # transformers reads the new names alone
        old_names = {name: old for name, old in _NOMIC_NAMES.items() if config.get(name) is None}
        own = {name: config[old] for name, old in old_names.items() if config.get(old) is not None}
        if config.get("hidden_act") is None and config.get("activation_function") is not None:
            own["hidden_act"] = "silu"
    if kind == "jina_bert":
        activation = config.get("feed_forward_type")
        if activation not in _JINA_ACTIVATIONS:
            problems.append(f"feed_forward_type must be geglu or reglu, got {activation!r:.100}")
        own["hidden_act"] = _JINA_ACTIVATIONS.get(str(activation), "gelu")
    if kind == "deberta-v2":
        parts = config.get("pos_att_type")
        parts = parts.lower().split("|") if isinstance(parts, str) else parts
        if not isinstance(parts, list) or {str(part).strip() for part in parts} != {"p2c", "c2p"}:
            problems.append(f"pos_att_type must be p2c|c2p, got {parts!r:.100}")
        if not isinstance(values["max_relative_positions"], int) or values["max_relative_positions"] < 1:
            own["max_relative_positions"] = values["max_position_embeddings"]
        if config.get("position_buckets") in (None, -1):
            own["position_buckets"] = 0
        for name in ("embedding_size", "pooler_hidden_size"):
            if config.get(name) not in (None, values["hidden_size"]):
                problems.append(f"{name} must be hidden_size ({values['hidden_size']}), got {config[name]!r:.100}")
    if kind == "modernbert":
        own["layer_types"] = _layer_types(config, values)
        half = config.get("sliding_window")
        if half is not None:  # transformers sets local_attention with it
            own["local_attention"] = 2 * half if isinstance(half, int) else half
        ropes, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling")
        if not isinstance(ropes, dict) or not {*ropes} <= {*_MODERNBERT_ROPES}:
            wanted = " and ".join(_MODERNBERT_ROPES)
            problems.append(f"rope_parameters must be an object with the names {wanted}, got {ropes!r:.100}")
            ropes = {}
        problems += _rope_problems(scaling)
        for layers, field in _MODERNBERT_ROPES.items():
            problems += _rope_problems(ropes.get(layers))
            own[field] = _theta(values[field], ropes.get(layers), scaling)
    elif values["positions"] == "rotary":
        scaling = config.get("rope_scaling") or config.get("rope_parameters")
        own["rope_theta"] = _theta(own.get("rope_theta", values["rope_theta"]), scaling)
        problems += _rope_problems(scaling, ("default", "ntk") if kind == "gte" else ("default",))
        if isinstance(scaling, dict) and _rope_type(scaling) == "ntk":  # refused above unless it is a GTE
            own["rope_factor"] = scaling.get("factor", 1.0)
            if scaling.get("mixed_b") is not None:
                problems.append(f"mixed_b of the rotary parameters must be absent, got {scaling['mixed_b']!r:.100}")
    if values["positions"] == "rotary":  # only these models of transformers read it
        sizes = [{**values, **own}[name] for name in ("hidden_size", "num_attention_heads")]
        head_size = sizes[0] // sizes[1] if all(isinstance(size, int) and size > 0 for size in sizes) else None
        if config.get("head_dim") not in (None, head_size):
            problems.append(f"head_dim must be hidden_size / num_attention_heads, got {config['head_dim']!r:.100}")
    return own, problems


def write(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json that `read` reads, in the version of transformers 5."""
    theta, local = fields["rope_theta"], fields["local_rope_theta"]
    default = {"rope_type": "default"}
    match kind:
        case "modernbert":
            parameters = {"full_attention": default | {"rope_theta": theta},
                          "sliding_attention": default | {"rope_theta": local}}  # fmt: skip
            kinds = fields["layer_types"] or ["full_attention"] * fields["num_hidden_layers"]
            return {"rope_parameters": parameters, "layer_types": [*kinds]}
        case "gte" if fields["rope_factor"] != 1:
            scaling = {"type": "ntk", "factor": fields["rope_factor"]}
            return {"model_type": "new", "position_embedding_type": "rope", "rope_theta": theta,
                    "rope_scaling": scaling}  # fmt: skip
        case "nomic_bert" | "gte" | "jina_embeddings_v3":
            return {"rope_parameters": default | {"rope_theta": theta}}
        case "jina_bert":
            activation = {"gelu": "geglu", "relu": "reglu"}[fields["hidden_act"]]
            return {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": activation}
        case "deberta-v2":
            return {"relative_attention": True, "share_att_key": True, "position_biased_input": False,
                    "norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"]}  # fmt: skip
    return {}


def _layer_types(config: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    given, every = config.get("layer_types"), config.get("global_attn_every_n_layers", 3)
    if given is not None:
        return tuple(given) if isinstance(given, list) else given
    layers = values["num_hidden_layers"]
    if not isinstance(layers, int) or not 0 < layers < 2**12 or not isinstance(every, int) or every < 1:
        return ()
    return tuple("sliding_attention" if i % every else "full_attention" for i in range(layers))


def _theta(default: Any, *ropes: Any) -> Any:
    """Returns the base of the rotary angles in the last of some rotary parameters that have one."""
    given = [rope["rope_theta"] for rope in ropes if isinstance(rope, dict) and rope.get("rope_theta") is not None]
    return [default, *given][-1]


def _rope_type(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _rope_problems(scaling: Any, types: tuple[str, ...] = ("default",)) -> list[str]:
    if scaling is None:
        return []
    if not isinstance(scaling, dict):
        return [f"the rotary parameters must be an object, got {scaling!r:.100}"]
    problems = []
    if _rope_type(scaling) not in types:
        problems.append(f"rotary positions of type {_rope_type(scaling)!r:.100} are not supported")
    if scaling.get("partial_rotary_factor", 1) != 1:
        problems.append(f"partial_rotary_factor must be 1, got {scaling['partial_rotary_factor']!r:.100}")
    return problems
