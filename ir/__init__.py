from dnnc.ir import expr as expr  # first: bounds.py and expr.py need each other
