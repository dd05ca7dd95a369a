"""One file for each family of routes, its bodies and objects beside it; `registry` imports them all."""
