"""Adapters trained on a swarm's nodes. Usage: finetune.py MODEL PEER_ADDRESS"""

import sys

from peft import LoraConfig
from transformers import AutoTokenizer

from nesa_node import AutoDistributedModelForCausalLM

name, peer = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
batch = tokenizer("The capital of France is Paris.", return_tensors="pt")
with (
    AutoDistributedModelForCausalLM.from_pretrained(name, initial_peers=[peer]) as model,
    model.finetuning_session(LoraConfig(target_modules="all-linear")) as session,
):
    for _ in range(10):
        print(session.step({**batch, "labels": batch["input_ids"]}).loss)
    session.save_pretrained("adapter")
