"""`dnnc.nn.utils`: what stands beside modules, under PyTorch's names."""
# ruff: noqa: I001  (this file is the list of the public names, by the module that has them)

from dnnc.nn.utils import rnn as rnn
from dnnc.optim.clipping import clip_grad_norm_ as clip_grad_norm_, clip_grad_value_ as clip_grad_value_
