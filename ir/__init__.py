from dnnc.ir import linear as linear  # normal forms, which making an expression needs
