"""transformers: model types with small configurations.

A configuration is the type's default with sizes from `SMALL`, in its parts (text, vision, audio) too, then what the
table says of the type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from families.entry import Entry, Made, Row, floats, image, integers, mask, tokens
from families.index import fraction

VOCABULARY, LENGTH = 512, 24
WIDTH, HEADS, LAYERS, INNER = 128, 4, 2, 256
SIZES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (
        WIDTH,
        (
            *(
                "hidden_size",
                "d_model",
                "n_embd",
                "dim",
                "embed_dim",
                "emb_dim",
                "model_dim",
                "decoder_hidden_size",
                "projection_dim",
            ),
            *(
                "embedding_size",
                "word_embed_proj_dim",
                "encoder_hidden_dim",
                "hidden_dim",
                "decoder_embed_dim",
                "conv_dim_out",
            ),
        ),
    ),
    (
        HEADS,
        (
            *(
                "num_attention_heads",
                "num_heads",
                "n_head",
                "n_heads",
                "encoder_attention_heads",
                "decoder_attention_heads",
                "attention_heads",
            ),
            *("decoder_num_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"),
        ),
    ),
    (
        2,
        (
            "num_key_value_heads",
            "multi_query_group_num",
            "num_kv_heads",
            "num_experts_per_tok",
            "moe_topk",
            "moe_k",
            "top_k_experts",
        ),
    ),
    (
        LAYERS,
        (
            *(
                "num_hidden_layers",
                "num_layers",
                "n_layer",
                "n_layers",
                "encoder_layers",
                "decoder_layers",
                "num_encoder_layers",
            ),
            *("num_decoder_layers", "num_blocks", "decoder_num_hidden_layers", "depth", "encoder_num_layers"),
        ),
    ),
    (
        INNER,
        (
            *(
                "intermediate_size",
                "ffn_dim",
                "d_ff",
                "encoder_ffn_dim",
                "decoder_ffn_dim",
                "d_inner",
                "n_inner",
                "ffn_hidden_size",
            ),
            *(
                "moe_intermediate_size",
                "decoder_intermediate_size",
                "shared_expert_intermediate_size",
                "intermediate_dim",
                "dim_feedforward",
            ),
        ),
    ),
    (32, ("head_dim", "d_kv", "attention_head_size", "kv_channels")),
    (VOCABULARY, ("vocab_size", "src_vocab_size", "tgt_vocab_size", "vocab_size_per_layer_input")),
    (4, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    (64, ("image_size",)),
    (16, ("patch_size",)),
)
SMALL = {name: size for size, names in SIZES for name in names}
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")
SPECIAL = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 2,
    "cls_token_id": 1,
}


TEXT, DECODER, SEQ2SEQ, VISION, BOTH = "text", "decoder", "seq2seq", "vision", "text and vision"
WAVE, SPEECH, VIDEO, SERIES = "wave", "speech", "video", "series"
TYPES = {
    TEXT: """albert bert bert-generation big_bird camembert canine convbert data2vec-text deberta deberta-v2
        distilbert electra ernie esm eurobert flaubert fnet ibert layoutlm luke megatron-bert mobilebert modernbert
        mpnet mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roformer splinter squeezebert xlm
        xlm-roberta xlm-roberta-xl xlnet xmod yoso longformer reformer perceiver markuplm lilt jina_embeddings_v3 dpr
        tapas imagegpt fastspeech2_conformer""",
    DECODER: """apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 cpmant ctrl deepseek_v2 deepseek_v3
        diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2
        gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite
        granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe kimi_linear
        lfm2 lfm2_moe llama llama4_text longcat_flash mamba mamba2 minicpm3 minimax minimax_m2 ministral mistral mixtral
        modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3
        phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss smollm3 stablelm starcoder2
        vaultgemma xglm xlstm youtu zamba zamba2 gemma3n_text""",
    SEQ2SEQ: """bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp
        nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5""",
    VISION: """beit bit convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers dinov3_vit
        donut-swin dpt glpn ijepa levit mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 poolformer pvt pvt_v2 segformer
        siglip_vision_model clip_vision_model swiftformer swin swin2sr swinv2 vit vit_mae vit_msn vitdet detr
        conditional_detr deformable_detr dab-detr table-transformer yolos maskformer superpoint depth_anything upernet
        sam_vision_model radio aimv2_vision_model mlcd_vision_model pixio""",
    BOTH: """altclip blip chinese_clip clip clipseg flava groupvit metaclip_2 owlv2 owlvit siglip vilt visual_bert
        bridgetower git aimv2""",
    WAVE: "wav2vec2 hubert sew sew-d unispeech unispeech-sat wavlm data2vec-audio wav2vec2-conformer",
    SPEECH: "whisper audio-spectrogram-transformer wav2vec2-bert speech_to_text moonshine parakeet_encoder "
    "voxtral_encoder encodec dac mimi univnet",
    VIDEO: "timesformer videomae vivit vjepa2",
    SERIES: "time_series_transformer informer autoformer patchtst patchtsmixer decision_transformer",
}
FAMILIES = {
    TEXT: "text encoder",
    DECODER: "text decoder",
    SEQ2SEQ: "text encoder-decoder",
    VISION: "vision of transformers",
    BOTH: "text and vision",
    WAVE: "audio",
    SPEECH: "audio",
    VIDEO: "video",
    SERIES: "time series",
}
MAMBA = {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 16, "time_step_rank": 8}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
ROUTED = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_routed_experts": 8}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "use_mamba_kernels": False}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
STAGES = {"depths": [2, 2, 2, 2], "embed_dim": 32, "num_heads": [1, 2, 4, 8]}
BACKBONE = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
RESNET: dict[str, Any] = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_config": {"model_type": "resnet", **BACKBONE},
}
PLAIN = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS}
DINO = {
    "model_type": "dinov2",
    "image_size": 56,
    "patch_size": 14,
    **PLAIN,
    "reshape_hidden_states": False,
    "apply_layernorm": True,
}
NECK = {
    "reassemble_hidden_size": WIDTH,
    "neck_hidden_sizes": [16, 32, 64, 64],
    "fusion_hidden_size": 32,
    "patch_size": 14,
}
SERIES_SIZES = {"prediction_length": 12, "context_length": 24, "num_time_features": 2}
CLASSES = {
    "superpoint": "SuperPointForKeypointDetection",
    "depth_anything": "DepthAnythingForDepthEstimation",
    "upernet": "UperNetForSemanticSegmentation",
}
VALUES: dict[str, dict[str, Any]] = {
    "mamba2": MAMBA,
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "attn_layer_indices": [1],
    },
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "mamba_d_ssm": 256,
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16},
    "deepseek_v2": {**LATENT, **ROUTED},
    "deepseek_v3": {**LATENT, **ROUTED},
    "minicpm3": LATENT,
    "youtu": LATENT,
    "longcat_flash": {**LATENT, "expert_ffn_hidden_size": 128, "zero_expert_num": 2, "moe_topk": 2},
    "kimi_linear": {**LATENT, **ROUTED},
    "glm4_moe": ROUTED,
    "jamba": JAMBA,
    "rwkv": {"attention_hidden_size": WIDTH},
    "recurrent_gemma": {"lru_width": WIDTH, "num_hidden_layers": 3, "num_key_value_heads": 4},
    "qwen3_next": {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "olmo_hybrid": {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 32,
        "mamba_d_state": 16,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 4,
        "lsh_attn_chunk_length": 8,
    },
    "longformer": {"attention_window": 8},
    "led": {"attention_window": [8, 8]},
    "big_bird": {"block_size": 4, "num_random_blocks": 2},
    "xlm": {"use_lang_emb": False},
    "phi": {"partial_rotary_factor": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 16},
    "codegen": {"rotary_dim": 16},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "lilt": {"hidden_size": 96},
    "dots1": {**ROUTED, "num_key_value_heads": 2, "n_shared_experts": 1},
    "luke": {"entity_vocab_size": 100},
    "swin2sr": {"embed_dim": 60, "depths": [2, 2], "num_heads": [6, 6]},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": 32},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 32},
    "ministral": {"rope_parameters": ROPE, "head_dim": 32, "num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron": {"num_key_value_heads": 2},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "swin": {"image_size": 224, **STAGES},
    "donut-swin": {"image_size": 224, **STAGES},
    "swinv2": {"image_size": 224, **STAGES},
    "detr": RESNET,
    "conditional_detr": RESNET,
    "deformable_detr": {
        **RESNET,
        "backbone_config": {**RESNET["backbone_config"], "out_features": ["stage2", "stage3", "stage4"]},
    },
    "dab-detr": RESNET,
    "table-transformer": RESNET,
    "upernet": {
        "backbone_config": {**RESNET["backbone_config"], "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "hidden_size": 64,
    },
    "depth_anything": {"backbone_config": {**DINO, "out_features": ["stage1", "stage2", "stage3", "stage4"]}, **NECK},
    "whisper": {"max_source_positions": 50},
    "voxtral_encoder": {"max_source_positions": 50},
    "audio-spectrogram-transformer": {"max_length": 128},
    "mimi": {"upsample_groups": WIDTH},
    "time_series_transformer": SERIES_SIZES,
    "informer": SERIES_SIZES,
    "autoformer": {**SERIES_SIZES, "label_length": 12},
    "patchtst": {"context_length": 96, "num_input_channels": 4},
    "patchtsmixer": {"context_length": 96, "num_input_channels": 4},
    "timesformer": {"num_frames": 4},
    "videomae": {"num_frames": 4},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 16, 16]},
    "vjepa2": {"frames_per_clip": 4, "crop_size": 64, "pred_num_hidden_layers": 1},
    "perceiver": {"num_latents": 16, "d_latents": WIDTH},
}


@dataclass(frozen=True)
class Kind:
    """A model type and what it takes."""

    name: str
    takes: str


def entries() -> list[Entry]:
    kinds = [Kind(name, takes) for takes, text in TYPES.items() for name in text.split()]
    return [Entry(f"hf_{k.name}", FAMILIES[k.takes], f"transformers:{k.name}", partial(make, k)) for k in kinds]


# --- configurations ---------------------------------------------------------------------------------------------------


def small_config(name: str) -> Any:
    """The default configuration of a type with small sizes, also in its parts."""
    default = CONFIG_MAPPING[name]()
    values = {**_small_values(default), **VALUES.get(name, {})}
    config = type(default)(**values)
    config._experts_implementation = (
        "batched_mm"  # weights gathered by token; the default sorts tokens by histc, which no exporter has
    )
    for part in (config, *(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))):
        if getattr(part, "use_cache", False):
            part.use_cache = False
    return config


def _small_values(config: Any) -> dict[str, Any]:
    """Arguments for a configuration's class, of those values that are larger than `SMALL`."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            values[name] = {**_small_values(value), "model_type": value.model_type}
        elif isinstance(value, int) and not isinstance(value, bool):
            if value > SMALL.get(name, value):
                values[name] = SMALL[name]
            if name in SPECIAL and value >= VOCABULARY:
                values[name] = SPECIAL[name]
        elif name in LAYER_LISTS and isinstance(value, list) and len(value) > LAYERS:
            values[name] = _sampled(value)
    return values


def _sampled(kinds: list[str]) -> list[str]:
    """As many kinds of layers as there are layers, different ones first."""
    different = list(dict.fromkeys(kinds))[:LAYERS]
    return sorted((different * LAYERS)[:LAYERS], key=kinds.index)


# --- models -----------------------------------------------------------------------------------------------------------


def make(kind: Kind, batch: int) -> Made:
    """A type's model with seeded weights. Decoders have their head, which costs more than a layer at times."""
    config = small_config(kind.name)
    net = _module(kind, config)
    keywords = {"return_dict": True, "use_cache": False}
    taken = inspect.signature(net.forward).parameters
    inputs = INPUTS[kind.name](config) if kind.name in INPUTS else inputs_of(kind, config)
    return Made(
        net, [i for i in inputs if i["name"] in taken], {k: v for k, v in keywords.items() if k in taken}, by_name=True
    )


def _module(kind: Kind, config: Any) -> nn.Module:
    """With PyTorch's attention for one half of the types, where they have it."""
    attention = "eager" if fraction(kind.name, "attention") < 0.5 else "sdpa"
    auto = AutoModelForCausalLM if kind.takes == DECODER else AutoModel
    own = getattr(transformers, CLASSES.get(kind.name, ""), None)
    make: Callable[..., nn.Module] = own._from_config if own else auto.from_config
    try:
        return make(config, attn_implementation=attention)
    except ValueError:
        if attention == "eager":
            raise
        return make(config, attn_implementation="eager")


# --- inputs -----------------------------------------------------------------------------------------------------------


def inputs_of(kind: Kind, config: Any) -> list[Row]:
    """Rows for what a type takes, by its group."""
    vocabulary = (
        getattr(config, "vocab_size", None)
        or getattr(getattr(config, "text_config", None), "vocab_size", None)
        or VOCABULARY
    )
    length = SHORT.get(kind.name, LENGTH)
    text = [tokens(length, vocabulary), mask(length)]
    if kind.takes == SEQ2SEQ:
        return [*text, tokens(16, vocabulary, "decoder_input_ids")]
    if kind.takes == VISION:
        return [_pixels(config)]
    if kind.takes == BOTH:
        return [*text, _pixels(config)]
    if kind.takes == WAVE:
        return [floats("input_values", "batch", 4000)]
    if kind.takes == VIDEO:
        return [{**_pixels(config), "shape": ["batch", 4, 3, 64, 64]}]
    return text


def _series(config: Any) -> list[Row]:
    """Windows of a series with features of time, for the past with the largest lag and for the future."""
    past, ahead = config.context_length + max(config.lags_sequence), config.prediction_length
    return [
        floats("past_values", "batch", past, shift=2.0),
        floats("past_time_features", "batch", past, 2),
        floats("past_observed_mask", "batch", past, value=1.0),
        floats("future_values", "batch", ahead, shift=2.0),
        floats("future_time_features", "batch", ahead, 2),
    ]


def _decisions(config: Any) -> list[Row]:
    steps = 12
    return [
        floats("states", "batch", steps, config.state_dim),
        floats("actions", "batch", steps, config.act_dim),
        floats("rewards", "batch", steps, 1),
        floats("returns_to_go", "batch", steps, 1),
        integers("timesteps", "batch", steps, hi=100),
        {"name": "attention_mask", "dtype": "int64", "shape": ["batch", steps], "prefix": True},
    ]


def _speech(bins: int, frames: int, time_first: bool = False) -> Callable[[Any], list[Row]]:
    """Spectrograms, and tokens for a decoder."""
    shape = (f"frames:{frames}", bins) if time_first else (bins, frames)
    return lambda config: [floats("input_features", "batch", *shape), tokens(12, VOCABULARY, "decoder_input_ids")]


SHORT = {"owlvit": 16, "owlv2": 16}
INPUTS: dict[str, Callable[[Any], list[Row]]] = {
    "whisper": _speech(80, 100),
    "voxtral_encoder": _speech(128, 100),
    "speech_to_text": _speech(80, 100, True),
    "wav2vec2-bert": _speech(160, 100, True),
    "parakeet_encoder": _speech(80, 100, True),
    "audio-spectrogram-transformer": lambda config: [floats("input_values", "batch", 128, 128)],
    "moonshine": lambda config: [floats("input_values", "batch", 8000), tokens(12, VOCABULARY, "decoder_input_ids")],
    "perceiver": lambda config: [floats("inputs", "batch", 32, config.d_model)],
    "encodec": lambda config: [floats("input_values", "batch", 1, 3200)],
    "dac": lambda config: [floats("input_values", "batch", 1, 4096)],
    "mimi": lambda config: [floats("input_values", "batch", 1, 7680)],
    "univnet": lambda config: [floats("input_features", "batch", 20, 100), floats("noise_sequence", "batch", 20, 64)],
    "time_series_transformer": _series,
    "informer": _series,
    "autoformer": _series,
    "patchtst": lambda config: [floats("past_values", "batch", 96, 4)],
    "patchtsmixer": lambda config: [floats("past_values", "batch", 96, 4)],
    "decision_transformer": _decisions,
    "vjepa2": lambda config: [floats("pixel_values_videos", "batch", 4, 3, 64, 64)],
    "fastspeech2_conformer": lambda config: [tokens(LENGTH, config.vocab_size)],
}


def _pixels(config: Any) -> Row:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else size
    return image(getattr(vision, "num_channels", 3), height, width, "pixel_values")
