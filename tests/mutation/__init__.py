"""Mutation testing of the claim, the fence and the phases: ``make mutants``, in half an hour, outside CI."""
