"""`dnnc.optim`: optimizers under PyTorch's names, with its formulas, defaults and order of arguments.

    optimizer = dnnc.optim.Adam([w, b], lr=1e-3)                      # define-by-run: zero_grad, backward, step
    step = dnnc.train_step(loss_fn, dnnc.optim.Adam(lr=1e-3), params)  # the whole iteration as one program

Both follow from one rule for each optimizer; see `dnnc.optim.optimizer`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from dnnc.array.methods import no_name as _no_name
from dnnc.optim import lr_scheduler as lr_scheduler
from dnnc.optim import swa_utils as swa_utils
from dnnc.optim.adaptive import Adadelta as Adadelta
from dnnc.optim.adaptive import Adafactor as Adafactor
from dnnc.optim.adaptive import Adagrad as Adagrad
from dnnc.optim.adaptive import RMSprop as RMSprop
from dnnc.optim.clipping import clip_grad_norm_ as clip_grad_norm_
from dnnc.optim.clipping import clip_grad_value_ as clip_grad_value_
from dnnc.optim.descent import ASGD as ASGD
from dnnc.optim.descent import SGD as SGD
from dnnc.optim.descent import Rprop as Rprop
from dnnc.optim.moments import LAMB as LAMB
from dnnc.optim.moments import Adam as Adam
from dnnc.optim.moments import Adamax as Adamax
from dnnc.optim.moments import AdamW as AdamW
from dnnc.optim.moments import NAdam as NAdam
from dnnc.optim.moments import RAdam as RAdam
from dnnc.optim.muon import Muon as Muon
from dnnc.optim.optimizer import Optimizer as Optimizer
from dnnc.optim.pruning import GradualPruning as GradualPruning
from dnnc.optim.pruning import KeepZeros as KeepZeros
from dnnc.optim.scaling import GradScaler as GradScaler

if not _TYPE_CHECKING:  # so that type checkers report misspelt names

    def __getattr__(name: str) -> object:
        raise _no_name("dnnc.optim", name, globals())
