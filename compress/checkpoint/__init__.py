"""The contract both halves share: integer codes, bit packing, file formats, reader, writer, verify.

Nothing here imports any other package of the project. `errors`, `scheme` and `demo` are free of torch, so a
command line can import them in milliseconds.
"""
