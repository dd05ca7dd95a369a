"""What each layer becomes: measured sensitivities, an allocation for a target, and the recipe that says so."""
