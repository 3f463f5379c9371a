"""The users of the project, whose keys are not numbers."""
