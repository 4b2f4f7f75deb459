"""Text from a swarm in six lines. Usage: generate.py MODEL PEER_ADDRESS"""

import sys

from transformers import AutoTokenizer

from nesa_node import AutoDistributedModelForCausalLM

name, peer = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
with AutoDistributedModelForCausalLM.from_pretrained(name, initial_peers=[peer]) as model:
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
