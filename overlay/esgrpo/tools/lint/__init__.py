"""`esgrpo lint SCRIPT`: what bash and Hydra would make of a launch script, said before a run says it."""
