#!/usr/bin/env bash
# Fully asynchronous GRPO with segment rollout. usage: [NAME=VALUE ...] bash bench/recipes/fully_async.sh [OVERRIDE ...]
# Check it first: esgrpo lint bench/recipes/fully_async.sh VERL=0.9.1 BACKEND=megatron --verl 0.9.1
# verl 0.7.0: run it in a patched checkout (./apply.sh); the overlay has no place in 0.7.1 and 0.8.0.
set -euo pipefail
NAME=fully-async
case "${VERL:-0.9.1}" in
    0.7.1 | 0.8.0) SEGMENT=${SEGMENT:-False} ;;
    *) SEGMENT=${SEGMENT:-True} ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

STALENESS=${STALENESS:-0.2}          # share of a round that may be generated ahead
SYNC_STEPS=${SYNC_STEPS:-4}          # optimiser steps between two weight syncs
ROLLOUT_PROMPTS=${ROLLOUT_PROMPTS:-51200}
CONCURRENT=${CONCURRENT:-}           # prompts that a replica generates at the same time; empty: verl's own 16 (0.9.1)

MODULE=verl.experimental.fully_async_policy.fully_async_main
CONFIG=fully_async_ppo_trainer
[ "$BACKEND" = megatron ] && CONFIG=fully_async_ppo_megatron_trainer
[ "$VERL" = 0.7.0 ] && MODULE=recipe.fully_async_policy.fully_async_main

ARGS+=(
    data.train_batch_size=0
    data.gen_batch_size=1
    rollout.nnodes=$NNODES
    rollout.n_gpus_per_node=$ROLLOUT_DEVICES
    rollout.total_rollout_steps=$ROLLOUT_PROMPTS
    async_training.staleness_threshold=$STALENESS
    async_training.trigger_parameter_sync_step=$SYNC_STEPS
    async_training.require_batches=1
    async_training.partial_rollout=True
)
if [ "$VERL" = 0.7.0 ]; then
    ARGS+=(rollout.total_epochs=$EPOCHS rollout.test_freq=$TEST_FREQ async_training.use_rollout_log_probs=True)
else
    ARGS+=(trainer.test_freq=$TEST_FREQ)
fi
[ -z "$CONCURRENT" ] || ARGS+=(async_training.concurrent_samples_per_replica=$CONCURRENT)

exec "${LAUNCH[@]}" python3 -m $MODULE --config-path=config --config-name=$CONFIG "${ARGS[@]}" "$@"
