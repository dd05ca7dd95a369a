"""One pure file per compression method: tensors in, integer codes out."""
