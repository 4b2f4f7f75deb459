"""Each line of notes.txt is learned, by transformers' Trainer.

Usage: finetune_with_trainer.py MODEL PEER_ADDRESS
"""

import sys
from pathlib import Path

from peft import LoraConfig
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from nesa_node import AutoDistributedModelForCausalLM

name, peer = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, padding_side="right")
lines = Path("notes.txt").read_text().splitlines()
arguments = TrainingArguments("adapter", use_cpu=True, save_strategy="no", report_to=[])
with (
    AutoDistributedModelForCausalLM.from_pretrained(name, initial_peers=[peer]) as model,
    model.finetuning_session(LoraConfig(target_modules="all-linear")) as session,
):
    trainer = Trainer(
        model=session.model,
        args=arguments,
        optimizers=(session.optimizer, None),
        train_dataset=[tokenizer(line) for line in lines],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    session.save_pretrained("adapter")
