"""The contract that both halves share: stored forms of weights, bit packing, containers, reader, writer, verification.

Descriptions of stored forms (`scheme`, `weights`) are free of torch until a tensor is touched, so command lines import
them in milliseconds.
"""
