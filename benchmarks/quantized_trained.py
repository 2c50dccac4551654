"""Do quantized models decide as their float32 models do? Trained models on inputs of the kind that they were made for.

    python benchmarks/quantized_trained.py [--only NAME,NAME] [--samples 300] [--calibration 48] [--draws 3]
        [--options '{"method": "percentile"}'] [--wheels DIR]

The models come out of the wheels of the zoo's table, which pip fetches once; fonts of Liberation or DejaVu have to be
installed. Words are rendered in those fonts, with noise and lines over those of the captcha reader; pages have words
on paper or on photographs; files are sources, libraries, images and data of the system. Each draw calibrates with
samples of its own, none of which the comparison takes.

A classifier agrees where its largest number stands at the same place, a segmentation where a pixel is on the same side
of the threshold. Neighbouring anchors of a detector propose the same box with nearly the same score, so boxes are
compared after non-maximum suppression: a detection of either model agrees where the other one has a box that overlaps
it by half. The last column is the agreement of the float32 model with itself after each pixel moved by up to one level
of grey: a decision that does not survive that is a tie.
"""

from __future__ import annotations

import argparse
import glob
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from sklearn.datasets import load_digits, load_sample_image
from zoo.build import from_wheel
from zoo.entries import ENTRIES, Wheel

import dnnc

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]
Generator = np.random.Generator
Samples = Callable[[int, int], list[Feed]]  # of (count, draw); draw 0 is that of the comparison
DIGITS = Path(__file__).parent.parent / "examples" / "digits.onnx"
FOLDER = "/usr/share/fonts/truetype"
FONTS = sorted(glob.glob(f"{FOLDER}/liberation*/*.ttf") or glob.glob(f"{FOLDER}/dejavu/*[!x].ttf"))
LETTERS = list("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz23456789")
WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
).split()
ROOTS = ("/usr/lib/python3", "/usr/share", "/usr/include", "/etc", "/usr/bin", str(Path(np.__file__).parent))


# --- inputs -----------------------------------------------------------------------------------------------------------


def word(rng: Generator) -> str:
    """Letters and digits, or a word."""
    return "".join(rng.choice(LETTERS, rng.integers(4, 7))) if rng.random() < 0.5 else str(rng.choice(WORDS))


def colour(rng: Generator, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.integers(low, high, 3).tolist())


def photo(rng: Generator, h: int, w: int) -> Image.Image:
    """A random part of one of scikit-learn's two photographs."""
    image = Image.fromarray(load_sample_image(str(rng.choice(["china.jpg", "flower.jpg"]))))
    share = rng.uniform(0.4, 1.0)
    cw, ch = int(image.width * share), int(image.height * share)
    x, y = int(rng.integers(0, image.width - cw + 1)), int(rng.integers(0, image.height - ch + 1))
    image = image.crop((x, y, x + cw, y + ch)).resize((w, h))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def line(rng: Generator, h: int, w: int, text: str, noise: bool) -> Image.Image:
    """A line of text that fills an image; with `noise` turned, blurred and with lines across."""
    paper = colour(rng, 180, 256)
    image = Image.new("RGB", (w, h), paper)
    draw = ImageDraw.Draw(image)
    size = int(h * rng.uniform(0.55, 0.8))
    font = ImageFont.truetype(str(rng.choice(FONTS)), size)
    while font.getlength(text) > 0.95 * w and size > 8:
        size -= 2
        font = ImageFont.truetype(font.path, size)
    left = rng.uniform(2, max(3, w - font.getlength(text) - 2))
    draw.text((left, (h - size) / 2 - 2), text, font=font, fill=colour(rng, 0, 110))
    if not noise:
        return image
    for _ in range(rng.integers(0, 4)):
        ends = [tuple(rng.integers(0, (w, h)).tolist()) for _ in range(2)]
        draw.line(ends, fill=colour(rng, 0, 200))
    image = image.rotate(rng.uniform(-6, 6), fillcolor=paper)
    if rng.random() < 0.3:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1)))
    pixels = np.asarray(image) + rng.normal(0, rng.uniform(0, 12), (h, w, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def page(rng: Generator, h: int, w: int) -> Image.Image:
    """Lines of words on paper or on a photograph."""
    image = photo(rng, h, w) if rng.random() < 0.5 else Image.new("RGB", (w, h), colour(rng, 200, 256))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(2, 12)):
        text = " ".join(word(rng) for _ in range(rng.integers(1, 5)))
        font = ImageFont.truetype(str(rng.choice(FONTS)), int(rng.integers(12, 48)))
        draw.text(tuple(rng.integers(0, (w - 60, h - 30)).tolist()), text, font=font, fill=colour(rng, 0, 255))
    return image


def planes(image: Image.Image) -> Array:
    """f32[1, 3, h, w] in 0 to 255."""
    return np.asarray(image.convert("RGB")).astype(np.float32).transpose(2, 0, 1)[None]


def captcha(rng: Generator) -> Feed:
    grey = np.asarray(line(rng, 64, 192, word(rng), True).convert("L")).astype(np.float32)
    return {"input1": ((grey / 255 - 0.5) / 0.5)[None, None]}


def turned_line(rng: Generator) -> Feed:
    image = line(rng, 48, 192, f"{word(rng)} {word(rng)}", False)
    return {"x": (planes(image.rotate(180) if rng.random() < 0.5 else image) / 255 - 0.5) / 0.5}


def normalized_page(rng: Generator) -> Feed:
    mean, deviation = (np.array(v, np.float32).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return {"x": (planes(page(rng, 480, 640)) / 255 - mean) / deviation}


def plain_page(rng: Generator) -> Feed:
    return {"images": planes(page(rng, 416, 416))}


def drawn(one: Callable[[Generator], Feed]) -> Samples:
    def samples(count: int, draw: int) -> list[Feed]:
        rng = np.random.default_rng(1000 + draw if draw else 1)
        return [one(rng) for _ in range(count)]

    return samples


def digits(count: int, draw: int) -> list[Feed]:
    images = (load_digits().images / 16).astype(np.float32)[:, None]
    order = np.random.default_rng(5).permutation(len(images))
    some = np.random.default_rng(draw).permutation(order[:300]) if draw else order[300:]
    return [{"image": images[[k]]} for k in some[:count]]


def files(count: int, draw: int) -> list[Feed]:
    """Files of the system, up to six of each suffix, as the two kilobytes at their ends."""
    found = _contents()
    quarter = len(found) // 4
    some = random.Random(draw).sample(found[:quarter], quarter) if draw else found[quarter:]
    return [{"bytes": ends(data)} for data in some[:count]]


@cache
def _contents() -> list[bytes]:
    by_suffix: dict[str, list[str]] = {}
    for root in ROOTS:
        for path in sorted(glob.glob(f"{root}/**/*", recursive=True)):
            by_suffix.setdefault(Path(path).suffix, []).append(path)
    shuffle = random.Random(0).shuffle
    found = [data for _, paths in sorted(by_suffix.items()) for data in _some(paths, shuffle)]
    shuffle(found)
    return found


def _some(paths: list[str], shuffle: Callable[[list[str]], None]) -> Iterator[bytes]:
    shuffle(paths)
    taken = 0
    for path in paths:
        if taken == 6:
            return
        try:
            with open(path, "rb") as f:
                data = f.read(1 << 20)
        except OSError:
            continue
        if len(data) >= 64:
            taken += 1
            yield data


def ends(data: bytes) -> Array:
    """The first and the last kilobyte, as magika reads them; 256 stands for nothing."""
    head, tail = data.lstrip()[:1024], data.rstrip()[-1024:]
    out = np.full((1, 2048), 256, np.int32)
    out[0, : len(head)] = np.frombuffer(head, np.uint8)
    if tail:
        out[0, 2048 - len(tail) :] = np.frombuffer(tail, np.uint8)
    return out


# --- decisions --------------------------------------------------------------------------------------------------------


def by_largest(got: Array, want: Array) -> tuple[float, float]:
    """Places that agree, and how many there are."""
    same = got.argmax(-1) == want.argmax(-1)
    return float(same.sum()), float(same.size)


def by_threshold(got: Array, want: Array) -> tuple[float, float]:
    same = (got > 0.3) == (want > 0.3)
    return float(same.sum()), float(same.size)


def by_boxes(got: Array, want: Array) -> tuple[float, float]:
    """Detections of either that the other has as well, and the detections of both.

    A detection has a score of 0.3; 0.1 is enough to confirm one of the other model.
    """
    found = count = 0
    for a, b in ((got, want), (want, got)):
        sure, likely = suppressed(a, 0.3), suppressed(b, 0.1)
        count += len(sure)
        if len(sure) and len(likely):
            found += int((overlaps(sure[:, :4], likely[:, :4]).max(1) >= 0.5).sum())
    return float(found), float(count)


def boxes(y: Array, size: int = 416) -> Array:
    """Left, top, right, bottom and score of each anchor of a YOLOX with one class."""
    centres, strides = [], []
    for stride in (8, 16, 32):
        n = size // stride
        centres.append(np.stack(np.meshgrid(np.arange(n), np.arange(n)), -1).reshape(-1, 2))
        strides.append(np.full((n * n, 1), stride))
    step = np.concatenate(strides)
    middle, half = (y[0, :, :2] + np.concatenate(centres)) * step, np.exp(y[0, :, 2:4]) * step / 2
    return np.concatenate([middle - half, middle + half, y[0, :, 4:5] * y[0, :, 5:6]], 1)


def suppressed(y: Array, least: float, most: float = 0.45) -> Array:
    """Non-maximum suppression: boxes with a score of `least`, none of which overlaps a better one by `most`."""
    found = boxes(y)
    found = found[found[:, 4] > least]
    found = found[np.argsort(-found[:, 4], kind="stable")]
    kept: list[Array] = []
    while len(found):
        kept.append(found[0])
        found = found[overlaps(found[:1, :4], found[:, :4])[0] <= most]
    return np.array(kept).reshape(-1, 5)


def overlaps(a: Array, b: Array) -> Array:
    """Intersection over union of all pairs."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(-1)
    areas = [(x[:, 2:] - x[:, :2]).prod(-1) for x in (a, b)]
    return both / (areas[0][:, None] + areas[1][None] - both)


def anchors(name: str, got: Sequence[Array], want: Sequence[Array]) -> str:
    """How near the two best anchors of the float model are, and how often another evaluation takes the same one."""
    same, gaps, shared = [], [], []
    for a, b in zip(got, want):
        x, y = boxes(a), boxes(b)
        first, second = np.argsort(-y[:, 4], kind="stable")[:2]
        best = x[:, 4].argmax()
        same.append(best == first)
        gaps.append(y[first, 4] - y[second, 4])
        shared.append(overlaps(x[[best], :4], y[[first], :4])[0, 0])
    return (
        f"{name}: the same best of {len(y)} anchors in {np.mean(same):.1%}. The two best scores differ by "
        f"{np.median(gaps):.4f}; the best box overlaps float32's by {np.median(shared):.2f} (medians)"
    )


def moved(feeds: Sequence[Feed], step: float) -> list[Feed]:
    """Images whose pixels are up to one level of grey, which is `step`, off."""
    rng = np.random.default_rng(7)
    return [{n: (a + step * rng.integers(-1, 2, a.shape)).astype(np.float32) for n, a in f.items()} for f in feeds]


# inputs, decisions, and a level of grey; files have none
MODELS: dict[str, tuple[Samples, Callable[[Array, Array], tuple[float, float]], float]] = {
    "digits": (digits, by_largest, 1 / 16),
    "ddddocr_common": (drawn(captcha), by_largest, 2 / 255),
    "ppocr_cls": (drawn(turned_line), by_largest, 2 / 255),
    "magika": (files, by_largest, 0.0),
    "ppocr_v4_det": (drawn(normalized_page), by_threshold, 1 / 255 / 0.226),
    "ddddocr_det": (drawn(plain_page), by_boxes, 1.0),
}
HEAD = ("model", "samples", "draw", "agreement", "relative error", "int8, int16, float", "float32, inputs moved")


# --- comparison -------------------------------------------------------------------------------------------------------


def outputs(executable: Any, feeds: Sequence[Feed]) -> list[Array]:
    """The first output of each call."""
    found = []
    for feed in feeds:
        result = executable(feed)
        found.append(np.array(result[0] if isinstance(result, tuple) else result))
    return found


def share(agree: Callable[[Array, Array], tuple[float, float]], got: Sequence[Array], want: Sequence[Array]) -> float:
    same, count = np.sum([agree(x, y) for x, y in zip(got, want)], 0)
    return float(same / count)


def opened(name: str, wheels: Path) -> onnx.ModelProto:
    """A trained model, from its wheel."""
    if name == "digits":
        return onnx.load(str(DIGITS))
    source = ENTRIES[name].source
    assert isinstance(source, Wheel)
    with tempfile.TemporaryDirectory() as scratch:
        return from_wheel(source, wheels, Path(scratch))


def compared(name: str, a: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """A row of the table for each draw, and what is to be said of it."""
    make, agree, step = MODELS[name]
    model = opened(name, a.wheels)
    feeds = make(a.samples, 0)
    size = {"dims": {"N": 1}} if name == "digits" else {}
    plain = dnnc.compile(model, **size)
    want = outputs(plain, feeds)
    shaken = outputs(plain, moved(feeds, step)) if step else None
    for draw in range(1, a.draws + 1):
        q = dnnc.quantize(model, make(a.calibration, draw), **a.options, **size)
        got = outputs(q.compile(**size), feeds)
        error = np.sqrt(sum(np.sum((x - y) ** 2.0) for x, y in zip(got, want)) / sum(np.sum(y**2.0) for y in want))
        counts = Counter(x.scheme for x in q.layers)
        cells = [name, str(len(feeds)), str(draw), f"{share(agree, got, want):.2%}", f"{error:.3f}"]
        cells += [
            ", ".join(str(counts[s]) for s in ("int8", "int16", "float")),
            "-" if shaken is None else f"{share(agree, shaken, want):.2%}",
        ]
        notes = [f"{name}, draw {draw}: {x.name} is {x.scheme}: {x.reason}" for x in q.layers if x.reason]
        if agree is by_boxes and shaken is not None:
            notes += [anchors("int8", got, want), anchors("float32, inputs moved", shaken, want)]
        yield "| " + " | ".join(cells) + " |", notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--calibration", type=int, default=48)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--wheels", type=Path, default=Path(tempfile.gettempdir()) / "dnnc-zoo-wheels")
    parser.add_argument("--options", type=json.loads, default={}, help="of dnnc.quantize, as JSON")
    a = parser.parse_args()
    notes: list[str] = []
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for name in a.only:
        for row, said in compared(name, a):
            notes += said
            print(row, flush=True)
    print("\n" + "\n".join(notes))


if __name__ == "__main__":
    main()
