"""Words that cross process boundaries and stand in records: each once, as an enumeration of what is written."""

from __future__ import annotations

import enum

PAYLOAD = "esgrpo"  # key in kv_transfer_params, vLLM's dict from scheduler to RequestOutput: what the book knows of it


class _Word(str, enum.Enum):
    """A string with a closed set of values; prints and serialises as its value (enum.StrEnum, which 3.10 lacks)."""

    __str__ = str.__str__
    __format__ = str.__format__


class Outcome(_Word):
    """How an attempt of a response ended, or the response itself."""

    FINISH = "finish"  # by itself, or at the budget
    PRUNE = "prune"
    YIELD = "yield"  # handed back at a boundary or by a rebalance: an attempt only
    ABORT = "abort"  # by a weight sync, or without a token by a rebalance: its client submits it again
    FAIL = "fail"  # no reward came of it
    CARRY = "carry"  # interrupted and handed back: it goes on later, perhaps under another worker


class LengthClass(_Word):
    SHORT = "short"
    BODY = "body"
    TAIL = "tail"


class Rule(_Word):
    """What ended or handed back a response before its own end."""

    REPETITION = "repetition"  # it is a proven loop
    BOUNDARY = "boundary"  # handed back at the end of its segment
    MOVE = "move"  # handed back once, to go on at a replica of the tail class
    SURPLUS = "surplus"  # handed back, because its replica had more than its share
    RESOLVED = "resolved"  # its finished siblings agree, and it is not likely to differ
    ENOUGH = "enough"  # its finished siblings have what an update needs
    VERDICT = "verdict"  # a learned score says that it will fail


class Treatment(_Word):
    """What becomes of a response that is cut (`algo/treatment.py`)."""

    FAILED = "failed"  # trained as it is: truncated, with the reward of a failure
    VALUE = "value"  # trained as it is, with its predicted reward
    DOUBLY_ROBUST = "doubly_robust"  # the same, and the responses that a coin spared correct the prediction
    MASKED = "masked"  # left out, and the responses that a coin spared carry weights


# treatments whose estimate needs more than the cut response itself
PREDICTED = (Treatment.VALUE, Treatment.DOUBLY_ROBUST)
UNBIASED = (Treatment.DOUBLY_ROBUST, Treatment.MASKED)  # with the coin, for whatever rule


class NullGroups(_Word):
    """What becomes of finished groups without a gradient (`algo/null_groups.py`)."""

    TRAIN = "train"
    SPARE = "spare"  # another prompt in their place while enough others wait for the trainer
    REPLACE = "replace"  # the same, always


class Status(_Word):
    """What has become of a sample, a prompt with its group of responses (`algo/experience.py`)."""

    WAITING = "waiting"  # given back by a restart, not issued yet
    RUNNING = "running"  # its responses are generated
    FINISHED = "finished"  # all of them ended: it waits for the trainer, or is in its hands
    CARRIED = "carried"  # the same, and the weights have changed since
    TRAINED = "trained"
    PRUNED = "pruned"  # finished without a gradient, and replaced by another
    DROPPED = "dropped"  # given up: its reward raises


class Process(_Word):
    """Kinds of processes of a run in which a hook may act."""

    DRIVER = "driver"
    TASK_RUNNER = "task-runner"
    V1_TASK_RUNNER = "v1-task-runner"
    ROLLOUTER = "rollouter"
    TRAINER = "trainer"
    ACTOR_WORKER = "actor-worker"
    ROLLOUT_WORKER = "rollout-worker"
    AGENT_LOOP_WORKER = "agent-loop-worker"
    REWARD_LOOP_WORKER = "reward-loop-worker"
    VLLM_SERVER = "vllm-server"
    ENGINE_CORE = "engine-core"


class Feature(_Word):
    """What a run may have switched on: names in ESGRPO_FEATURES, by which hooks are needed or not."""

    CPU = "cpu"  # platforms
    NPU = "npu"
    V1 = "v1"  # verl's v1 trainers
    OBSERVE = "observe"
    SEGMENT = "segment"
    PRUNE = "prune"
    YIELD = "yield"
    DMMPT = "dmmpt"
    POIS = "pois"
    SAIS = "sais"
    HISTORY = "history"
    ROUTING = "routing"
    TAILS = "tails"
    SAMPLER = "sampler"
    WEIGHTED = "weighted"
    KEEP = "keep"
    TOKEN_OUTPUTS = "token_outputs"
    OVERLAP = "overlap"
    NULL_GROUPS = "null_groups"
