"""Which scheme each layer gets: measured sensitivities, an allocation for a target, and the recipe that says so."""
