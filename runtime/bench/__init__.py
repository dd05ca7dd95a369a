"""Load on a server, and what it does to those who wait: workload, client, figures, plot. No torch."""
