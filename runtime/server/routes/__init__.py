"""One file for each family of routes, its bodies and objects next to it; `registry` imports them all."""
