"""Generators of machine code for this processor, through LLVM.

`program.py` compiles them in a child process; `engine/machine_code.py` starts it and runs the
result. Modules here import nothing else of this package, and only the child imports them.
"""
