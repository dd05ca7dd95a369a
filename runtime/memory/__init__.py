"""Memory that serving a checkpoint takes, and the requests that fit, from its headers."""
