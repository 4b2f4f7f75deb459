"""Machine code for the processor at hand: what is computed, written for LLVM.

`program.py` compiles it in a process of its own; `engine/machine_code.py` asks for it and runs it.
Nothing here imports anything of ours but what lies here, and nothing else imports it.
"""
