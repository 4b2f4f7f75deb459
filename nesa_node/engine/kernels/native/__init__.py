"""Generators of machine code for this processor, through LLVM.

`compiler.py` compiles them in a child process; `engine/kernels/machine_code.py` starts it and runs
the result. Modules here import nothing else of this package, and only the child imports them.
"""
