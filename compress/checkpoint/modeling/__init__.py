"""Models of transformers by the names of files: experts one by one, and parts that files hold apart."""
