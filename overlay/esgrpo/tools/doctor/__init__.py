"""`esgrpo doctor`: what is wrong with this environment, or with the run that left this log.

environment.py  what is found here: parsers over injected readers, so that a fake host is a test
checks.py       rules: facts -> findings with a fix each
logs.py         a training log -> the known failure in it; signatures.toml has them as data
signs.py        what a log says of a failure that is not known: exceptions, suspicious lines, how it ends
texts.toml      what all of these say, in both languages
stacks.toml     the Ascend stacks that upstream documents, and how to install them

Imports no upstream and works where an installation is broken.
"""
