"""`dnnc.array.sparse`: sparse matrices in SciPy's names, whose values are arrays of `dnnc.array`.

from dnnc.array import sparse
a = sparse.csr_array(scipy_or_dense)
y = a @ x                                    # lazy, traced by dnnc.jit, differentiated by dnnc.grad
"""

from dnnc.array.sparse.arrays import SparseArray as SparseArray
from dnnc.array.sparse.arrays import bsr_array as bsr_array
from dnnc.array.sparse.arrays import coo_array as coo_array
from dnnc.array.sparse.arrays import csb_array as csb_array
from dnnc.array.sparse.arrays import csr_array as csr_array
from dnnc.array.sparse.arrays import sddmm as sddmm

__all__ = ["SparseArray", "bsr_array", "coo_array", "csb_array", "csr_array", "sddmm"]
