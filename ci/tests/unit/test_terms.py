"""Words of records and messages: one place each, equal to what older records hold, and plain where they leave us."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest

from esgrpo.algo.accounting import batch_metrics
from esgrpo.algo.history import came_to_its_end
from esgrpo.algo.pruned_rows import length_bias
from esgrpo.algo.terms import Feature, LengthClass, Outcome, Process, Rule

ROOT = Path(__file__).resolve().parents[3]
WORDS = {str(word) for words in (Outcome, Rule) for word in words}


def asks_about(node: ast.expr) -> str:
    """The key or attribute that an expression reads: row["rule"], row.get("rule"), verdict.rule; else empty."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        return str(getattr(node.args[0], "value", ""))
    return getattr(node, "attr", getattr(node, "id", ""))


def literal_words(source: str) -> list[int]:
    """Lines that hold an outcome or a rule against a string literal."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if {asks_about(side) for side in sides} & {"outcome", "rule"} and any(
                    isinstance(side, ast.Constant) and side.value in WORDS for side in sides):
                found.append(node.lineno)
    return found


def test_nobody_spells_an_outcome_or_a_rule_again():
    paths = [*(ROOT / "overlay" / "esgrpo").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    found = {str(path.relative_to(ROOT)): lines for path in paths
             if (lines := literal_words(path.read_text(encoding="utf-8")))}
    assert len(paths) > 100 and not found


@pytest.mark.parametrize("source", ['row["outcome"] == "prune"', '"move" != decision.rule', 'r.get("rule") == "enough"',
                                    'outcome == "abort" and full'])
def test_a_literal_is_seen(source):
    assert literal_words(source) == [1]


@pytest.mark.parametrize("words", [Outcome, Rule, LengthClass, Process, Feature])
def test_a_word_is_what_is_written(words):
    for word in words:
        text = word.value
        assert (word == text, hash(word) == hash(text), str(word), f"{word}") == (True, True, text, text)
        assert type(str(word)) is str and json.loads(json.dumps({word: word})) == {text: text}
        assert pickle.loads(pickle.dumps(word)) is word and {text: 1}[word] == 1


def row(group="g", outcome="finish", rule="", **facts):
    """As an older run wrote it: no schema, plain strings."""
    return json.loads(json.dumps({
        "group": group, "outcome": outcome, "rule": rule, "tokens": 10, "attempts": 1, "reprefill": 0, "boundaries": 0,
        "spans": [[0, 10]], "started": 1.0, "ended": 3.0, "candidate_rule": "", "keep_probability": 1.0, **facts}))


def test_older_rows_are_counted_by_their_rule():
    kept, pruned = [row(tokens=4)] * 3, [row(outcome="prune", rule="repetition", tokens=40)]
    assert length_bias([*kept, *pruned]) == {"repetition": pytest.approx(0.25)}


@pytest.mark.parametrize("outcome, full, ended", [
    ("finish", False, True), ("finish", True, True), ("prune", True, False), ("prune", False, False),
    ("abort", False, False), ("abort", True, True), (None, False, True)])
def test_which_responses_are_those_that_would_have_been(outcome, full, ended):
    assert came_to_its_end(outcome, full) == ended


def test_what_became_of_the_rows_of_a_batch():
    rows = [row(pruned=False, trained=True, gradient=True), row(pruned=True, trained=True, gradient=False, tokens=3)]
    found = batch_metrics(rows)
    assert (found["waste/pruned"], found["prune/rate"]) == (3, 0.5)


def test_keys_that_several_hooks_share_are_written_once():
    """The partition of v1's queue, how its keys end, and the key of what an engine hands back."""
    from esgrpo.hooks import verl

    hooks = Path(verl.__file__).parents[1]
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in hooks.rglob("*.py")
             if "v1" in path.parts or path.name in ("rollout_driver.py", "segment_mixin.py")}
    literals = {name: [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
                for name, tree in trees.items()}
    assert [name for name, found in literals.items() if "train" in found] == ["queue_rows.py"]
    assigned = [target.id for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Assign)
                for target in node.targets if isinstance(target, ast.Name)]
    assert assigned.count("AFTER_UID") == 1 and not {"KEY_TAIL", "PARTITION", "PAYLOAD"} & set(assigned)
