"""LoRA adapters (arXiv:2106.09685) over the linears of a model, in the files of PEFT."""
