"""The class for data.sampler under verl 0.7's own create_rl_sampler, executed from its source."""

from __future__ import annotations

import ast
import logging
import sys
from types import ModuleType

import pytest

from ci.tests.contract import patched
from ci.tests.contract import prompt_owners as owners

pytest.importorskip("verl")

PROMPTS = 10
CLASS = {"class_path": "pkg://esgrpo.hooks.verl.curriculum", "class_name": "PromptCurriculum"}
TAGS = ("v0.7.0", "v0.7.1")


def functions(path, *names: str) -> str:
    """Source of these top-level functions of a file that cannot be imported here."""
    text = path.read_text(encoding="utf-8")
    found = [node for node in ast.parse(text).body if getattr(node, "name", "") in names]
    assert len(found) == len(names)
    return "\n\n".join(ast.get_source_segment(text, node) for node in found)


@pytest.fixture(params=TAGS)
def create(request, monkeypatch):
    """create_rl_sampler of the release, with its loader and its abstract classes; torch and DataProto are today's."""
    source = patched.pristine("verl", request.param) / "verl"
    module = ModuleType("verl.experimental.dataset.sampler")
    exec((source / "experimental/dataset/sampler.py").read_text(encoding="utf-8"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if "verl.experimental.dataset" not in sys.modules:
        package = ModuleType("verl.experimental.dataset")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    names = {"logger": logging.getLogger(__name__), "AbstractSampler": module.AbstractSampler, "PKG_PATH_PREFIX":
             "pkg://", "FILE_PATH_PREFIX": "file://"}
    exec("import importlib, importlib.util, os\nfrom typing import Optional\n" + functions(
        source / "utils/import_utils.py", "load_module", "load_extern_object"), names)
    exec(functions(source / "trainer/main_ppo.py", "create_rl_sampler"), names)
    owners.provide_history(monkeypatch)
    owners.switched_on(monkeypatch, sampler={"enable": True})
    from esgrpo.hooks.verl import curriculum

    curriculum._class.cache_clear()
    yield names["create_rl_sampler"], module
    curriculum._class.cache_clear()


def data(**more):
    config = owners.settings().data
    config.update({"sampler": CLASS, **more})
    return config


def rewarded(numbers, right):
    """The batch that fit() hands to update(): a correct response in `right` of RESPONSES for each prompt."""
    import numpy as np
    import torch
    from verl.protocol import DataProto

    rows = [number for number in numbers for _ in range(owners.RESPONSES)]
    raw = np.empty(len(rows), dtype=object)
    raw[:] = [owners.Prompts.raw(number) for number in rows]
    scores = [float(row % owners.RESPONSES < right(number)) for row, number in enumerate(rows)]
    return DataProto.from_dict(
        {"token_level_scores": torch.tensor(scores)[:, None], "responses": torch.zeros(len(rows), 6, dtype=torch.int64),
         "attention_mask": torch.ones(len(rows), 8)},
        non_tensors={"uid": np.array([f"uid-{number}" for number in rows], dtype=object), "raw_prompt": raw})


def test_verl_takes_the_class_and_it_learns(create):
    make, module = create
    sampler = make(data(), owners.Prompts(PROMPTS))
    assert isinstance(sampler, module.AbstractCurriculumSampler) and len(sampler) == PROMPTS
    numbers = []
    for _ in range(20):
        taken = list(sampler)
        numbers += taken
        sampler.update(rewarded(sorted(set(taken)), lambda number: 1 if number % 2 else owners.RESPONSES))
    late = numbers[-10 * PROMPTS:]
    assert sum(number % 2 for number in late) > 0.6 * len(late)
    assert sampler.prompts.metrics()["realised_gradient"] > 0.5


def test_its_state_is_torchdatas(create):
    from torchdata.stateful_dataloader import StatefulDataLoader

    make, _ = create
    first = StatefulDataLoader(owners.Prompts(PROMPTS), batch_size=2, sampler=make(data(), owners.Prompts(PROMPTS)),
                               collate_fn=lambda rows: [row["number"] for row in rows])
    iterator = iter(first)
    head = [next(iterator) for _ in range(2)]
    state, tail = first.state_dict(), list(iterator)
    second = StatefulDataLoader(owners.Prompts(PROMPTS), batch_size=2, sampler=make(data(), owners.Prompts(PROMPTS)),
                                collate_fn=lambda rows: [row["number"] for row in rows])
    second.load_state_dict(state)
    assert list(second) == tail and len(head) + len(tail) == PROMPTS // 2


def test_without_the_key_verl_shuffles(create):
    """Negative control, and verl's own guard against workers that ask ahead."""
    make, module = create
    assert not isinstance(make(data(sampler=None), owners.Prompts(PROMPTS)), module.AbstractSampler)
    with pytest.raises(AssertionError, match="num_workers must be 0"):
        make(data(dataloader_num_workers=2), owners.Prompts(PROMPTS))


def test_the_key_is_gone_in_0_8_0():
    source = patched.pristine("verl", "v0.8.0") / "verl" / "trainer" / "main_ppo.py"
    assert "sampler.class_path" not in functions(source, "create_rl_sampler")
