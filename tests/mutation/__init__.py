"""Mutation testing of the claim, the fence and the phases: ``make mutants`` takes half an hour, and
does not run in CI."""
