"""Speculative decoding: cheap drafts that the target model verifies in one step."""
