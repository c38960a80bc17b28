"""verl 0.7.0: its fully-async recipe, a package beside verl. Files are named as those for verl 0.9 that do the same."""
