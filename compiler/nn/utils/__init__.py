"""`dnnc.nn.utils`: what stands beside modules, under PyTorch's names."""
# ruff: noqa: I001  (this file is the list of the public names, by the module that has them)

from dnnc.nn.utils import parametrizations as parametrizations, parametrize as parametrize, rnn as rnn
from dnnc.nn.utils.sparse import to_dense as to_dense, to_sparse as to_sparse
from dnnc.nn.utils.vectors import parameters_to_vector as parameters_to_vector
from dnnc.nn.utils.vectors import vector_to_parameters as vector_to_parameters
from dnnc.optim.clipping import clip_grad_norm_ as clip_grad_norm_, clip_grad_value_ as clip_grad_value_
from dnnc.optim.clipping import clip_grads_with_norm_ as clip_grads_with_norm_, get_total_norm as get_total_norm
