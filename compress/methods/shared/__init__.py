"""Parts that several methods share: Hessians, the column solver and smoothing."""
