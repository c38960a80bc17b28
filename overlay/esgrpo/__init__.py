"""ES-GRPO: elastic segment rollout, group pruning and pseudo-on-policy losses over an unmodified verl + vLLM."""

__version__ = "0.1.0"
