"""Neural style (Gatys et al. 2015) by random features: a photo's pixels, learnt in the style of a flower.
python examples/neural_style.py [--target llvm|cuda] [--steps 100] [--size 96] [--out style.png]"""

import argparse
import sys

import numpy as np
from scikit import load_sample_image

import dnnc.nn.functional as F
from dnnc import nn, optim, random, train_step

try:
    from PIL import Image
except ImportError:
    sys.exit("this example reads photos with Pillow: pip install pillow")


def photo(name, size):
    image = Image.fromarray(load_sample_image(name)).resize((size, size))
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 255


def main(argv=None):
    parser = argparse.ArgumentParser()
    for name, default in (("target", "llvm"), ("steps", 100), ("size", 96), ("out", "style.png")):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args(argv)
    random.seed(0)
    layers = [nn.Conv2d(n, m, 3, stride) for n, m, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2))]

    def features(image):  # what is seen, and which features go together: the style
        made = [image[None]]
        for layer in layers:
            made.append(F.relu(F.instance_norm(layer(made[-1]))))
        return made[-1], [f @ f.mT / f.shape[1] for f in (m.reshape(m.shape[1], -1) for m in made[1:])]

    def loss_of(image):
        seen, grams = features(image)
        return F.mse_loss(seen, content) + 10 * sum(map(F.mse_loss, grams, style))

    content, style = features(photo("china.jpg", args.size))[0], features(photo("flower.jpg", args.size))[1]
    step = train_step(loss_of, optim.Adam(lr=0.02), photo("china.jpg", args.size), target=args.target)
    print("loss {:.4f} -> {:.4f}".format(*[float(step()) for _ in range(args.steps)][:: args.steps - 1]))
    pixels = np.clip(255 * step.params.to_device("cpu").numpy(), 0, 255).astype(np.uint8)
    Image.fromarray(pixels.transpose(1, 2, 0)).save(args.out)


if __name__ == "__main__":
    main()
