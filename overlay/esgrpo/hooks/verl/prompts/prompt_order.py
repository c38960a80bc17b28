"""The prompt sampler in the shape of a data loader's sampler: one class for all of verl's trainers.

verl saves its data loader's state at every checkpoint and restores it. torchdata asks the sampler's iterator for its
part of that state, so the sampler's is saved and restored with it, in the same file and at the same moment.
"""

from __future__ import annotations

import functools
import inspect
import random

from esgrpo.errors import EsgrpoError, say
from esgrpo.hooks.verl import owned

STATE_KEY = "esgrpo"


class PromptOrder:
    """`len` and `iter` as a data loader wants them: one epoch is as many prompts as the data set has.

    `owner` is the rollouter or trainer that has the prompt history; `version()` is the weight version, None leaves the
    history at the version of its last observation (verl's rollouter does not know the version). A prompt is chosen at
    the moment it is asked for.
    """

    def __init__(self, dataset, owner, version=lambda: None):
        self.dataset, self.owner, self.version = dataset, owner, version
        owned.of(owner, owned.Prompts).order = self

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Takes:
        return Takes(self)

    @functools.cached_property
    def prompts(self):
        """Made on first use: the history is loaded when the run directory and the settings are known."""
        from esgrpo import config
        from esgrpo.algo.prompt_sampling import PromptSampler
        from esgrpo.hooks.verl.prompts.prompt_history import history_of

        settings = config.current()
        history = history_of(self.owner)
        sampler = PromptSampler(settings.sampler, history, random.Random(f"prompts {settings.seed}"),
                                len(self.dataset), lambda number: self.facts_of(number)[0],
                                self.owner.config.actor_rollout_ref.rollout.n,
                                lambda number: self.facts_of(number)[1])
        _listen(history, sampler)
        return sampler

    @functools.cached_property
    def facts_of(self):
        """Of a prompt's number: its key in the history, and the features of its text. A row is read once: a data set
        makes it anew every time."""
        from esgrpo.algo.history import prompt_key
        from esgrpo.algo.prompt_prior import features_of

        @functools.cache
        def facts(number: int):
            row = self.dataset[number]
            text = "\n".join(str(message.get("content", "")) for message in row["raw_prompt"])
            return prompt_key(row["raw_prompt"]), features_of(text, str(row.get("data_source", "")))

        return facts

    def restore(self, state: dict) -> None:

        try:
            if STATE_KEY not in state:
                raise ValueError("the checkpoint was written without the prompt sampler")
            self.prompts.restore(state[STATE_KEY])
        except (ValueError, KeyError, TypeError) as error:
            say(EsgrpoError("prompt-sampler", f"{type(error).__name__}: {error}", "the state of a prompt sampler of "
                            "the same data", "prompts are chosen anew, what is known of them is kept in the history",
                            "nothing, if the data or the settings were changed on purpose"))


class Takes:
    """Iterator over one epoch."""

    def __init__(self, order: PromptOrder):
        self.order, self.yielded = order, 0

    def __iter__(self) -> Takes:
        return self

    def __next__(self) -> int:
        if self.yielded >= len(self.order):
            raise StopIteration
        self.yielded += 1
        return self.order.prompts.take(self.order.version())

    def state_dict(self) -> dict:
        """Ours, and what torchdata's RandomSampler wants to find when a run goes on without the prompt sampler."""
        import torch

        seed = self.order.owner.config.data.get("seed")
        generator = torch.Generator().manual_seed(0 if seed is None else seed)
        return {"yielded": self.yielded, "generator": generator.get_state(), STATE_KEY: self.order.prompts.to_state()}

    def load_state_dict(self, state: dict) -> None:
        self.yielded = int(state.get("yielded", 0))
        self.order.restore(state)


def with_prompt_order(owner, loader, version=lambda: None):
    """A data loader like verl's, whose prompts are chosen. Without workers: they ask long before outcomes are known."""
    return type(loader)(dataset=loader.dataset, batch_size=loader.batch_size, num_workers=0, drop_last=loader.drop_last,
                        collate_fn=loader.collate_fn, sampler=PromptOrder(loader.dataset, owner, version))


def _listen(history, sampler) -> None:
    """Whoever tells the history how a group ended tells the sampler, too: it reports what it had expected."""
    observe = history.observe

    @functools.wraps(observe)
    def observed(*args, **kwargs):
        arguments = inspect.signature(observe).bind(*args, **kwargs).arguments
        features = sampler.outcome(arguments["key"], arguments["correct"])
        return observe(**{**arguments, "features": features})

    history.observe = observed  # shadows the method on this one instance


def metrics_of(owner) -> dict[str, float]:
    """esgrpo/sampler/* of this rollouter or trainer; empty when the sampler is off or was not asked yet."""
    order = owned.of(owner, owned.Prompts).order
    if order is None or "prompts" not in vars(order):
        return {}
    return {f"esgrpo/sampler/{name}": value for name, value in order.prompts.metrics().items()}


def take_counts(owner) -> dict[str, int]:
    """Takes of this rollouter or trainer since the last call, by what decided about them."""
    order = owned.of(owner, owned.Prompts).order
    return {} if order is None or "prompts" not in vars(order) else order.prompts.take_counts()
