"""Answers of legacy_actor_probe.py, computed once for all tests that read them."""

from __future__ import annotations

import json
from pathlib import Path

from ci.tests.contract import release_0_7_0

HERE = Path(__file__).parent
CASES = ("probe", "vanilla", "vanilla-one-masked-row", "reinforce", "pois", "pois-on-policy-shortcut",
         "version-on-policy-shortcut", "sais-on-policy-shortcut", "dmmpt", "masked-micro-batch",
         "pois-masked-micro-batch")
ROWS, DRIFT = 4, 0.25  # of the probe; nats


_trees: dict[str, Path] = {}
_answers: dict[str, dict] = {}


def trees(tmp_path_factory) -> dict[str, Path]:
    """v0.7.0 as it is, and with our patches."""
    if not _trees:
        for name, slugs in (("pristine", ()), ("patched", release_0_7_0.SLUGS)):
            _trees[name] = release_0_7_0.whole_tree(tmp_path_factory.mktemp(name), slugs)
    return _trees


_megatron: dict[str, dict] = {}


def megatron_answers(forked_python, overlay, tmp_path_factory) -> dict[str, dict]:
    """The same for the Megatron actor: "pristine" and "patched" with the overlay loaded."""
    if not _megatron:
        for kind in ("pristine", "patched"):
            done = forked_python(HERE / "legacy_megatron_probe.py", path=(trees(tmp_path_factory)[kind], overlay, HERE),
                                 ESGRPO_ENABLE="1", ESGRPO_FEATURES="observe,pois,dmmpt")
            _megatron[kind] = json.loads(done.stdout.splitlines()[-1])
    return _megatron


def answers(forked_python, overlay, tmp_path_factory) -> dict[str, dict]:
    """By kind: "pristine" and "patched" with the overlay loaded, "alone" is patched without it."""
    if not _answers:
        for kind, tree, variables in (("pristine", "pristine", {"ESGRPO_ENABLE": "1"}),
                                      ("patched", "patched", {"ESGRPO_ENABLE": "1"}), ("alone", "patched", {})):
            done = forked_python(HERE / "legacy_actor_probe.py", *CASES,
                                 path=(trees(tmp_path_factory)[tree], overlay, HERE),
                                 ESGRPO_FEATURES="observe,pois,sais,dmmpt", **variables)
            _answers[kind] = json.loads(done.stdout.splitlines()[-1])
    return _answers
