"""Hugging Face models in and out: config.json, safetensors, tokenizer files <-> run folders.

``architectures.py`` says which of their models a ``DecoderConfig`` can be, ``translate.py`` turns one config into the
other, ``names.py`` is the table of tensors, ``files.py`` reads and writes safetensors a slice or a shard at a time,
``convert.py`` puts them together (read it first), ``verify.py`` compares logits with ``transformers``.

The parameters stay fp32 here, so bf16, fp16 and fp32 come in exactly; what a tensor was is remembered in the run
folder's ``huggingface/tensors.json``, and an export is bit for bit what was imported.
"""
