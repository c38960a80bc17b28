"""What the tests of the prompt hooks share: a data set, a config, and a history where the overlay has none yet."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

RESPONSES = 4
BUDGET = 32


class Prompts:
    """A data set as verl's RLHFDataset shows it: rows with raw_prompt and a tensor."""

    def __init__(self, size: int):
        self.size, self.asked = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict:
        import torch

        self.asked.append(number)
        return {"raw_prompt": self.raw(number), "dummy_tensor": torch.tensor([number], dtype=torch.uint8),
                "index": number, "number": number, "data_source": "test"}

    @staticmethod
    def raw(number: int) -> list[dict]:
        return [{"role": "user", "content": f"prompt {number}"}]


def key(number: int) -> str:
    from esgrpo.algo.history import prompt_key

    return prompt_key(Prompts.raw(number))


def settings(**more):
    """The parts of verl's config that these methods read."""
    from omegaconf import OmegaConf

    return OmegaConf.create({
        "actor_rollout_ref": {"rollout": {"n": RESPONSES, "multi_turn": {"enable": False}}, "actor": {}},
        "data": {"dataloader_num_workers": 0, "gen_batch_size": 1, "train_batch_size": 0, "val_batch_size": 1,
                 "shuffle": True, "seed": 1, "max_response_length": BUDGET, "train_files": "", "val_files": ""},
        "trainer": {"total_epochs": 100, "total_training_steps": None, "resume_mode": "auto", "default_hdfs_dir": None,
                    "default_local_dir": "", "v1": {"sampler": {}}},
        "algorithm": {}, "async_training": {"trigger_parameter_sync_step": 1}, **more})


def solved(history, numbers) -> None:
    """Tell the history that these prompts are always answered correctly: no gradient."""
    for number in numbers:
        for version in range(8):
            history.observe(key(number), [8] * RESPONSES, [True] * RESPONSES, [False] * RESPONSES, version)


def mixed(history, numbers) -> None:
    """Tell the history that one response in four of these prompts is correct."""
    verdicts = [True] + [False] * (RESPONSES - 1)
    for number in numbers:
        for version in range(8):
            history.observe(key(number), [8] * RESPONSES, verdicts, [False] * RESPONSES, version)


class Remembered:
    """Stands in for algo.history.PromptHistory: mean length and plain counts."""

    def __init__(self):
        self.seen: dict[str, list] = {}

    def observe(self, key, lengths, correct, capped, version=None):
        entry = self.seen.setdefault(key, [1.0, 1.0, 0, 0])
        known = [value for value in correct if value is not None]
        entry[0] += sum(known)
        entry[1] += len(known) - sum(known)
        entry[2] += sum(lengths)
        entry[3] += len(lengths)

    def posterior(self, key, version=None):
        return tuple(self.seen.get(key, [1.0, 1.0])[:2])

    def forecast(self, key, version=None):
        alpha, beta, tokens, count = self.seen.get(key, [1.0, 1.0, 16, 1])
        return {"tokens": tokens / count, "low": 1.0, "high": 32.0, "known": key in self.seen, "length_class": "body",
                "alpha": alpha, "beta": beta}

    def to_state(self):
        return {"seen": self.seen}


def provide_history(monkeypatch) -> None:
    """The overlay's own history, or stand-ins under its names."""
    if importlib.util.find_spec("esgrpo.algo.history") is None:
        module = ModuleType("esgrpo.algo.history")
        module.prompt_key = lambda raw_prompt: json.dumps(raw_prompt, sort_keys=True)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if importlib.util.find_spec("esgrpo.hooks.verl.prompts.prompt_history") is None:
        module = ModuleType("esgrpo.hooks.verl.prompts.prompt_history")

        def history_of(owner):
            return vars(owner).setdefault("remembered", Remembered())

        module.history_of, module.path = history_of, lambda: None
        monkeypatch.setitem(sys.modules, module.__name__, module)
        import esgrpo.hooks.verl.prompts as package

        monkeypatch.setattr(package, "prompt_history", module, raising=False)


def history_of(owner):
    """The history that the hooks of this owner use."""
    from esgrpo.hooks.verl.prompts.prompt_history import history_of

    return history_of(owner)


def switched_on(monkeypatch, **sections) -> None:
    """The settings of this process, and their features."""
    from esgrpo import config

    segment = config.parse({"enable": True, "segment_length": 8, "history": {"enable": True}, **sections})
    monkeypatch.setenv(config.ENV_SEGMENT, config.to_json(segment))
    monkeypatch.setenv(config.ENV_FEATURES, ",".join(sorted(config.features(segment, "vanilla"))))


def hooked(monkeypatch, owner, name: str, hook_file: str) -> None:
    """Put a hook on a real class for the time of one test, as the engine would."""
    from esgrpo.call import wrapped

    code = importlib.import_module(f"esgrpo.hooks.verl.{hook_file}")
    monkeypatch.setattr(owner, name, wrapped(code, vars(owner)[name]))


def modified(actor_class):
    """The class inside a Ray actor class."""
    return actor_class.__ray_metadata__.modified_class


def bare(cls, **attributes):
    """An instance that was never initialised: no Ray, no model."""
    return_value = object.__new__(cls)
    vars(return_value).update(attributes)
    return return_value


def remote(function) -> SimpleNamespace:
    """Looks like a method of an actor handle."""
    return SimpleNamespace(remote=function)
