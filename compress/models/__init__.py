"""Model families: one file each, read by the compressor and by the runtime. Does not import torch."""
